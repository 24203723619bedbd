"""Policies that end their process or wait for ever."""

import os
import signal
import sys
import time

from orca_jax.policy import Decision, PolicyView
from tests.simulate.broken import Sound


class Exits(Sound):
    def decide(self, view: PolicyView) -> Decision:
        sys.exit(0)


class EndsTheProcess(Sound):
    def decide(self, view: PolicyView) -> Decision:
        os._exit(0)


class Sleeps(Sound):
    def decide(self, view: PolicyView) -> Decision:
        time.sleep(1000)
        return super().decide(view)


class LoopsWithoutTheSignal(Sound):
    def decide(self, view: PolicyView) -> Decision:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        while True:
            time.sleep(0.01)


class OnAModel(Sound):
    may_starve = True
