//! What is written of a trace, and what a frame is in words.

pub mod message;
pub mod sketch;
pub mod wire;
