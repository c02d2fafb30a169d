//! The state that guests share while they handle a frame, and the frames that they send.

use super::request::Requests;
use super::tally::Tally;
use super::tcp::Nanos;
use super::wire::{self, Ends, FRAME_MOST, Header};

/// Octets of `struct virtio_net_hdr` (Linux: include/uapi/linux/virtio_net.h).
pub(super) const VNET: usize = support::tap::VNET_HDR_LEN;
/// VIRTIO_NET_HDR_F_NEEDS_CSUM.
pub(super) const NEEDS_CHECKSUM: u8 = 1;
/// The start of the TCP checksum's range in a frame, and the checksum's offset in the TCP header.
const CHECKSUM_START: u16 = 34;
const CHECKSUM_OFFSET: u16 = 16;

/// Sends frames to the network.
pub(super) trait Transmit {
    /// Sends a frame, with its virtio header if the tap has one.
    fn send(&mut self, frame: &[u8]);
}

/// The behaviour of all guests of a storm.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Manner {
    /// Frames begin with a virtio header, and the device computes checksums.
    pub(super) vnet: bool,
    pub(super) keep_alive: bool,
    /// The guest pauses between two requests.
    pub(super) lone: bool,
    /// The service closes connections first, so the guest reads beyond its answer to the end of the connection.
    pub(super) to_the_end: bool,
    /// Answers may have any octets.
    pub(super) any_octets: bool,
    /// How often a failed request is repeated.
    pub(super) retries: u8,
}

/// The state that all guests share while frames are handled.
pub(super) struct World<'a> {
    pub(super) now: Nanos,
    pub(super) manner: Manner,
    pub(super) requests: &'a Requests,
    pub(super) bodies: &'a [u8],
    pub(super) tally: &'a mut Tally,
    pub(super) out: &'a mut dyn Transmit,
    pub(super) scratch: &'a mut Scratch,
    pub(super) random: &'a mut fastrand::Rng,
}

/// Buffers that are used for one frame.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    frame: Vec<u8>,
    pub(super) request: Vec<u8>,
    pub(super) sacks: Vec<(u32, u32)>,
}

impl World<'_> {
    fn begin(&mut self, virtio: [u8; VNET]) {
        self.scratch.frame.clear();
        self.scratch.frame.reserve(VNET + FRAME_MOST);
        if self.manner.vnet {
            self.scratch.frame.extend(virtio);
        }
    }

    pub(super) fn arp(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.begin([0; VNET]);
        write(&mut self.scratch.frame);
        self.out.send(&self.scratch.frame);
    }

    pub(super) fn segment(&mut self, ends: &Ends, header: &Header) {
        let [start, offset] = [CHECKSUM_START, CHECKSUM_OFFSET].map(u16::to_ne_bytes);
        // Flags, GSO type, header length, GSO size, checksum start and offset.
        self.begin([NEEDS_CHECKSUM, 0, 0, 0, 0, 0, start[0], start[1], offset[0], offset[1]]);
        let Scratch { frame, request, sacks } = self.scratch;
        wire::segment(frame, ends, header, sacks, request, self.manner.vnet);
        self.out.send(frame);
    }
}
