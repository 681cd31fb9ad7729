"""Generated from `protos/vcpo/wire/v1`; regenerate with `make protos`."""
