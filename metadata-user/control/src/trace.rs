//! The output of a trace: its lines, and the description of a frame.

pub mod message;
pub mod sketch;
pub mod wire;
