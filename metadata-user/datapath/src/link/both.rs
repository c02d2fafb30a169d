//! Reads two frame sources as one.

use rustix::event::epoll;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::FrameSource;
use crate::afxdp::SocketStats;

/// Two sources that alternate: each call starts with the other source, so that neither starves.
#[derive(Debug)]
pub struct Both<A, B> {
    one: A,
    other: B,
    /// Readable while either source is.
    any: OwnedFd,
    begins_with_one: bool,
}

impl<A: FrameSource, B: FrameSource> Both<A, B> {
    /// Joins two sources.
    ///
    /// # Errors
    /// No descriptor is free, or one of the sources cannot be polled.
    pub fn new(one: A, other: B) -> std::io::Result<Self> {
        let any = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (number, fd) in [one.as_fd(), other.as_fd()].into_iter().enumerate() {
            epoll::add(&any, fd, epoll::EventData::new_u64(number as u64), epoll::EventFlags::IN)?;
        }
        Ok(Self { one, other, any, begins_with_one: true })
    }
}

impl<A: FrameSource, B: FrameSource> FrameSource for Both<A, B> {
    fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
        let Self { one, other, begins_with_one, .. } = self;
        *begins_with_one = !*begins_with_one;
        if *begins_with_one {
            let lent = one.receive(max, &mut f);
            lent + other.receive(max - lent, f)
        } else {
            let lent = other.receive(max, &mut f);
            lent + one.receive(max - lent, f)
        }
    }

    fn stats(&self) -> Option<SocketStats> {
        Some(self.one.stats()?.plus(self.other.stats()?))
    }
}

/// For `poll(2)`: readable while either source holds frames.
impl<A, B> AsFd for Both<A, B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.any.as_fd()
    }
}
