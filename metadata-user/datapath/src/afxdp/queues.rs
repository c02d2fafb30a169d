//! Reads the sockets of all queues of one device as one source.

use rustix::event::epoll;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::error::AfxdpError;
use super::socket::{Socket, SocketConfig, SocketStats};

/// Minimum number of RX ring places per queue if there are several: 8 times the size of the veth's ring in front of
/// it.
pub const MIN_QUEUE_RING: u32 = 2_048;

/// One [`Socket`] for each receive queue of a device.
#[derive(Debug)]
pub struct Queues {
    sockets: Vec<Socket>,
    /// Readable while any of the sockets is readable.
    any: OwnedFd,
    /// The queue to read first. Each call starts with the next one, so that a full queue does not starve the others.
    first: usize,
}

impl Queues {
    /// Binds a socket to each of the `queues` receive queues of an interface, like [`Socket::bind`]. They share the
    /// places of `config`, but each has at least [`MIN_QUEUE_RING`].
    ///
    /// # Errors
    /// [`AfxdpError`], by the step that failed; no socket or memory remains.
    pub fn bind(ifindex: u32, queues: u32, config: &SocketConfig) -> Result<Self, AfxdpError> {
        let each = share(queues, config);
        let any = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(AfxdpError::Open)?;
        let mut sockets = Vec::new();
        for queue in 0..queues.max(1) {
            let socket = Socket::bind(ifindex, queue, &each)?;
            epoll::add(&any, &socket, epoll::EventData::new_u64(queue.into()), epoll::EventFlags::IN)
                .map_err(|source| AfxdpError::Setup { step: "epoll_ctl", source })?;
            sockets.push(socket);
        }
        Ok(Self { sockets, any, first: 0 })
    }

    /// Octets of frame memory that [`Queues::bind`] pins.
    #[must_use]
    pub fn memory(queues: u32, config: &SocketConfig) -> u64 {
        let each = share(queues, config);
        u64::from(queues.max(1)) * u64::from(each.chunks) * u64::from(each.chunk_size)
    }

    /// The sockets for the XSKMAP, with their queue numbers.
    pub fn descriptors(&self) -> impl Iterator<Item = (u32, BorrowedFd<'_>)> {
        (0..).zip(self.sockets.iter().map(AsFd::as_fd))
    }

    /// Lends up to `max` received frames to `f`, oldest first within a queue; returns how many. Never blocks.
    pub fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
        let count = self.sockets.len();
        let first = self.first;
        self.first = (first + 1) % count;
        let mut lent = 0;
        for at in 0..count {
            if lent == max {
                break;
            }
            lent += self.sockets[(first + at) % count].receive(max - lent, &mut f);
        }
        lent
    }

    /// The sums of all sockets' counters.
    ///
    /// # Errors
    /// [`AfxdpError::Statistics`] if the kernel does not provide a socket's counters.
    pub fn stats(&self) -> Result<SocketStats, AfxdpError> {
        self.sockets.iter().try_fold(SocketStats::default(), |sum, socket| Ok(sum.plus(socket.stats()?)))
    }
}

/// For `poll(2)`: readable while any socket holds frames.
impl AsFd for Queues {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.sockets[..] {
            [only] => only.as_fd(),
            _ => self.any.as_fd(),
        }
    }
}

/// The sizes of each socket if there are several.
fn share(queues: u32, config: &SocketConfig) -> SocketConfig {
    let queues = queues.max(1).next_power_of_two();
    let part = |all: u32| (all / queues).max(MIN_QUEUE_RING.min(all));
    SocketConfig { rx_ring: part(config.rx_ring), chunks: part(config.chunks), ..*config }
}

#[cfg(test)]
mod tests {
    use super::{Queues, SocketConfig, share};

    #[test]
    fn queues_share_the_places_and_each_has_the_minimum() {
        let all = SocketConfig::default();
        for (queues, each) in [(1, 8_192), (2, 4_096), (3, 2_048), (4, 2_048), (8, 2_048)] {
            let found = share(queues, &all);
            assert_eq!((found.rx_ring, found.chunks), (each, each), "{queues} queues");
            assert_eq!(Queues::memory(queues, &all), u64::from(queues * each) * 4_096);
        }
        let small = SocketConfig { rx_ring: 64, chunks: 64, ..all };
        assert_eq!(share(4, &small).rx_ring, 64);
    }
}
