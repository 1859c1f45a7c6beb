"""Is it true? Features scored by the game's own objects, and attributions checked by experiment."""
