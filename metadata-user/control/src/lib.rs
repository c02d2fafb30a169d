//! The control socket's protocol: the types that the agent and its clients share, and the clients.

pub mod instances;
pub mod status;
pub mod top;
pub mod trace;
