//! One pinned thread per hub: wait, receive, step, send, reap. The only room with a clock and a poll.
