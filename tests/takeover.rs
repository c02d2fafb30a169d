//! An agent takes over the ports of another agent under load, and no guest notices. If either agent dies, guests are
//! served again after the next start at the latest.

#[path = "takeover/connections.rs"]
mod connections;
#[path = "takeover/crowd.rs"]
mod crowd;
#[path = "takeover/failures.rs"]
mod failures;
#[path = "takeover/node.rs"]
mod node;
#[path = "takeover/talk.rs"]
mod talk;
