//! Frames to the stack and back.
