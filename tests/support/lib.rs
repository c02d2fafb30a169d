//! Namespaces, taps and pretend guests for the statements in this crate, the demo and the lab.
