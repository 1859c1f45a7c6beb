"""Statistical methods that several analyses use."""
