"""Steps, output and samples that several analyses share."""
