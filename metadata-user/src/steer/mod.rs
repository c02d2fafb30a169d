//! Load, attach, fill the maps, detach. The only room that names aya.
