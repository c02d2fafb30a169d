//! Slot to responses; readers never wait.
