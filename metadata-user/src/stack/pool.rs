//! Connections with their buffers, bounded and used again.

use smoltcp::iface::{SocketHandle, SocketSet};
use smoltcp::socket::tcp::{Socket, SocketBuffer};

use super::config::{RECEIVE_BUFFER, SEND_BUFFER, SPARE_CONNECTIONS};

/// One TCP state machine, alone in a set of its own: demultiplexing is ours, so that a segment costs the
/// same however many connections there are.
pub(super) struct Tcp {
    pub(super) set: SocketSet<'static>,
    handle: SocketHandle,
}

impl Tcp {
    fn new() -> Self {
        let buffer = |octets| SocketBuffer::new(vec![0; octets]);
        let mut socket = Socket::new(buffer(RECEIVE_BUFFER), buffer(SEND_BUFFER));
        // An answer is handed over whole, so the last short segment of it must not wait for an ACK
        // (RFC 1122 §4.2.3.4), nor our ACK for an answer that may take a while: one that is ready at
        // once carries it anyway.
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(None);
        let mut set = SocketSet::new(Vec::with_capacity(1));
        let handle = set.add(socket);
        Self { set, handle }
    }

    pub(super) fn socket(&self) -> &Socket<'static> {
        self.set.get(self.handle)
    }

    pub(super) fn socket_mut(&mut self) -> &mut Socket<'static> {
        self.set.get_mut(self.handle)
    }
}

/// Every connection is either lent out or spare.
pub(super) struct Pool {
    spare: Vec<Tcp>,
    lent: usize,
    limit: usize,
}

impl Pool {
    pub(super) fn new(limit: usize) -> Self {
        Self { spare: Vec::new(), lent: 0, limit }
    }

    /// A closed connection, or `None` at the limit.
    pub(super) fn take(&mut self) -> Option<Tcp> {
        if self.lent >= self.limit {
            return None;
        }
        self.lent += 1;
        Some(self.spare.pop().unwrap_or_else(Tcp::new))
    }

    /// Takes a connection back, whatever its state, without a word to its peer.
    pub(super) fn put(&mut self, mut tcp: Tcp) {
        self.lent -= 1;
        if self.spare.len() < SPARE_CONNECTIONS {
            tcp.socket_mut().abort();
            self.spare.push(tcp);
        }
    }

    pub(super) fn lent(&self) -> usize {
        self.lent
    }

    pub(super) fn spare(&self) -> usize {
        self.spare.len()
    }
}
