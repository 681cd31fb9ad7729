"""The training loop, where event loop and tensor thread meet: wait, update, publish, save."""
