//! Tells when devices of a namespace come, go or change: a deleted tap raises no event on its sockets.

use rtnetlink::sys::{AsyncSocket as _, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE};
use std::future::poll_fn;
use std::io;
use tokio::runtime::Handle;

use super::SteerError;
use super::netns::Netns;

/// `RTMGRP_LINK`: the multicast group of device changes (rtnetlink(7)).
const LINKS: u32 = 1;
/// Messages read for one change at most: a storm of changes is one change, and the rest is the next.
const MESSAGES_AT_ONCE: usize = 256;
/// A watch on the devices of one namespace.
///
/// Holding it keeps the namespace alive: drop it when the VM it was opened for goes.
pub struct LinkWatch {
    socket: TokioSocket,
}

impl LinkWatch {
    /// Watches a namespace, named as in [`PortName`](crate::port::PortName); `None` is the calling thread's.
    ///
    /// Call it inside a tokio runtime with I/O enabled. Look at the devices after this returns: what changed
    /// before is not told.
    ///
    /// # Errors
    /// When the namespace cannot be opened or entered (`CAP_SYS_ADMIN`), or there are no descriptors left.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn open(netns: Option<&str>) -> Result<Self, SteerError> {
        let netns = netns.map_or_else(Netns::own, Netns::open)?;
        let runtime = Handle::current();
        let open = || -> io::Result<TokioSocket> {
            let _inside = runtime.enter();
            let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
            socket.socket_mut().bind(&SocketAddr::new(0, LINKS))?;
            Ok(socket)
        };
        let socket = netns.run(|| open().map_err(|source| SteerError::device("watch devices", source)))?;
        Ok(Self { socket })
    }

    /// Waits until a device came, went or changed. Changes close together may be told once, so look at all
    /// devices afterwards; steering's own attaching counts as a change too. Cancel safe.
    ///
    /// # Errors
    /// When the kernel refuses to read on; the watch is of no more use then.
    pub async fn changed(&mut self) -> io::Result<()> {
        // One octet of a message will do: the socket is in one group, whose messages all tell of a device.
        let first = poll_fn(|context| self.socket.poll_recv(context, &mut [0_u8; 1].as_mut_slice())).await;
        overrun_is_fine(first)?;
        for _ in 1..MESSAGES_AT_ONCE {
            match self.socket.socket_ref().recv(&mut [0_u8; 1].as_mut_slice(), 0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                more => overrun_is_fine(more.map(drop))?,
            }
        }
        Ok(())
    }
}

/// More came than the socket holds: what was lost may have been a change, and counts as one.
fn overrun_is_fine(outcome: io::Result<()>) -> io::Result<()> {
    outcome.or_else(|error| if error.raw_os_error() == Some(libc::ENOBUFS) { Ok(()) } else { Err(error) })
}
