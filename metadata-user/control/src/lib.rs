//! What an agent and those who ask it have in common: the answers of the control socket, and how to ask for them.

pub mod instances;
pub mod status;
pub mod trace;
