"""Anthropic's messages API on the generation path of chats: conversion, answers, streams and errors."""
