//! An agent takes over the ports of another agent under load, and no guest notices. Guests are served whichever of
//! the two dies.

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
