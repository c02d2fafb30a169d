//! The configuration file and its defaults.
