//! The control socket's protocol: the types that the agent and its clients share, the clients, and the live view that
//! one of them draws.

pub mod instances;
pub mod order;
pub mod screen;
pub mod status;
pub mod top;
pub mod trace;
