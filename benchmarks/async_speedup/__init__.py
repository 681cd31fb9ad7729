"""Synchronous and asynchronous runs side by side, paced as hardware would pace them."""
