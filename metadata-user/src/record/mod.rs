//! The VM record, its validation and derivations.
