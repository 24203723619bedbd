"""A retention as a stranger would write it from docs/own_scheduler.md: frequent pages first, but not for ever."""

from orca_jax.policy import API, Keeping


class Frequent:
    """The fewest uses first, where each use counts half after ten minutes; expensive pages count more."""

    api = API
    reads = frozenset({"program"})

    def __init__(self, half_life=600.0):
        self.half_life = half_life
        self.uses, self.since = {}, {}

    def count(self, session, now):
        """The uses of a session until now, as far as they still count."""
        age = now - self.since.get(session, now)
        return self.uses.get(session, 0.0) * 0.5 ** (age / self.half_life)

    def keep(self, span, now):
        if span.has_ended or span.priority == 0:
            self.uses.pop(span.session, None)
            return Keeping(-1.0)
        if span.ttl is not None and now < span.kept_at + span.ttl:
            return Keeping(1e9, span.kept_at + span.ttl - now)
        uses = self.count(span.session, now) if span.session else span.hits
        # asked again after a while, since uses count less then
        return Keeping((1.0 + uses) * (span.start + span.num_tokens), self.half_life / 4)

    def used(self, span, now):
        if not span.session:
            return
        self.uses[span.session] = 1.0 + self.count(span.session, now)
        self.since[span.session] = now

    def lost(self, span, now):
        if self.count(span.session, now) < 0.1:
            self.uses.pop(span.session, None)
            self.since.pop(span.session, None)
