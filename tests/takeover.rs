//! One agent takes the ports of another over under load, and no guest notices; whichever dies, guests are served.

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
