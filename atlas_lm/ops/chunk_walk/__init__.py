"""The one sequential part of a matrix memory: from chunk border to chunk border."""
