//! Frames of quiet guests in other namespaces than the agent's: the ring by which a hub's worker gets them.
//!
//! A classifier's redirect ends at the border of its namespace. So `port_tcx` behind the stubs (`stubs`) goes on in
//! `ring`, of which each hub has an instance with a BPF ring buffer of its own. The worker takes frames out of it as
//! out of the AF_XDP sockets; answers go by the hub tap as ever.
//!
//! The buffer belongs to the agent. Once that is killed, what guests send fills it and is then dropped and counted: ports
//! stay closed. The next agent puts a new buffer in its place.

use aya::Ebpf;
use aya::maps::{MapData, RingBuf};
use metadata_common::maps::{RING_HEADER, name, program};
use std::os::fd::{AsFd, BorrowedFd};

use super::tables::Tables;
use super::{HUBS_OF_A_SIDE, SteerError, Steering, mode, object, tables};
use metadata_datapath::afxdp::SocketStats;
use metadata_datapath::link::FrameSource;

/// The reading end of a hub's ring. It has one owner.
pub struct Ring {
    buffer: RingBuf<MapData>,
    stats: SocketStats,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

/// The frame in a record: `None` for a record that `ring` has not written.
fn frame_in(record: &[u8]) -> Option<&[u8]> {
    let (length, rest) = record.split_first_chunk::<RING_HEADER>()?;
    rest.get(..usize::try_from(u64::from_ne_bytes(*length)).ok()?)
}

impl FrameSource for Ring {
    fn receive(&mut self, max: usize, mut f: impl FnMut(&[u8])) -> usize {
        let mut lent = 0;
        while lent < max {
            let Some(record) = self.buffer.next() else { break };
            // An empty frame is a runt, which the link drops and counts.
            let frame = frame_in(&record).unwrap_or_default();
            lent += 1;
            self.stats.frames += 1;
            self.stats.bytes += frame.len() as u64;
            f(frame);
        }
        lent
    }

    /// The kernel side counts what had no room (`ring_drop_full`).
    fn stats(&self) -> Option<SocketStats> {
        Some(self.stats)
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.buffer.as_fd()
    }
}

/// Makes the ring of a hub, out of an instance of the object that is the hub's, and opens it to `port_tcx`.
pub(super) fn put(ebpf: &mut Ebpf, tables: &mut Tables, hub: u32) -> Result<Ring, SteerError> {
    let ring = Ring { buffer: tables::take(ebpf, name::RING)?, stats: SocketStats::default() };
    let loaded = object::load_classifier(ebpf, program::RING)?;
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| {
        SteerError::map(name::RINGS, format!("enter hub {hub}"), source)
    };
    tables.set_ring(hub, loaded.fd().map_err(|error| failed(error.into()))?)?;
    Ok(ring)
}

/// As [`put`], where the kernel has what it takes. Without it ports in other namespaces keep XDP.
pub(super) fn put_if_possible(ebpf: &mut Ebpf, tables: &mut Tables, hub: u32) -> Option<Ring> {
    if !mode::has_tcx() {
        return None;
    }
    put(ebpf, tables, hub)
        .inspect_err(|error| tracing::warn!("ports of other namespaces keep XDP: {error}"))
        .ok()
}

impl Steering {
    /// The ring of a hub, for its worker, once; `None` where the kernel has none to give.
    pub fn take_ring(&mut self, hub: u32) -> Option<Ring> {
        self.rings.get_mut((hub % HUBS_OF_A_SIDE) as usize).and_then(Option::take)
    }
}

#[cfg(test)]
mod tests {
    use super::frame_in;

    #[test]
    fn a_record_holds_the_frame_that_its_length_says_and_no_other() {
        let record = |length: u64, octets: &[u8]| [&length.to_ne_bytes(), octets].concat();
        assert_eq!(frame_in(&record(3, b"abcdef")), Some(&b"abc"[..]));
        assert_eq!(frame_in(&record(0, b"abc")), Some(&b""[..]));
        for wrong in [record(4, b"abc"), record(u64::MAX, b"abc"), vec![0; 7], Vec::new()] {
            assert_eq!(frame_in(&wrong), None, "{wrong:?}");
        }
    }
}
