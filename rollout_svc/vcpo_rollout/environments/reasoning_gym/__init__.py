"""Generated tasks of the library reasoning-gym, and the process that scores answers to them."""
