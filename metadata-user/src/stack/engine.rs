//! What all ports share of smoltcp: one interface, since without an Ethernet layer it holds nothing of a
//! port, and one place to build frames.

use smoltcp::iface::{Config, Interface, SocketSet};
use smoltcp::time::Instant;
use smoltcp::wire::HardwareAddress;
use std::time::Duration;

use super::config::MTU;
use super::device::{Wire, capabilities};
use super::frame::{ETHERNET, Route};
use super::seam::Transmit;

/// How much faster smoltcp's clock runs. Its retransmission timeout is never below 1 s (RFC 6298 §2.4),
/// which suits a wide network; the guest is on the same host, less than a millisecond away. With this
/// clock the bounds are 200 ms and 12 s, where Linux has 200 ms and 120 s.
const CLOCK_RATE: u32 = 5;

/// smoltcp's word for a moment of [`Now::mono`](crate::time::Now).
pub(super) fn instant(at: Duration) -> Instant {
    let micros = at.as_micros() * u128::from(CLOCK_RATE);
    Instant::from_micros(i64::try_from(micros).unwrap_or(i64::MAX))
}

/// The way back: the first moment that is not before `at`.
pub(super) fn moment(at: Instant) -> Duration {
    let micros = u64::try_from(at.total_micros()).unwrap_or(0);
    Duration::from_micros(micros.div_ceil(u64::from(CLOCK_RATE)))
}

/// The shared parts.
pub(super) struct Engine {
    pub(super) interface: Interface,
    pub(super) scratch: Vec<u8>,
    pub(super) sent: u64,
    nobody: SocketSet<'static>,
}

impl Engine {
    pub(super) fn new(seed: u64) -> Self {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = seed;
        let mut interface = Interface::new(config, &mut Nothing, Instant::ZERO);
        // Which addresses are ours is decided before a packet gets here.
        interface.set_any_ip(true);
        let nobody = SocketSet::new(Vec::new());
        Self { interface, scratch: vec![0; ETHERNET + MTU], sent: 0, nobody }
    }

    /// Answers a packet that belongs to no connection: an echo request with its reply, a segment with
    /// RST. True when there was something to answer.
    pub(super) fn answer(
        &mut self,
        now: Duration,
        packet: &[u8],
        route: Route,
        out: &mut dyn Transmit,
    ) -> bool {
        let mut wire = Wire::new(Some(packet), route, &mut self.scratch, out);
        self.interface.poll_ingress_single(instant(now), &mut wire, &mut self.nobody);
        self.sent += wire.sent;
        wire.sent > 0
    }
}

/// The device the interface is made for; it asks for nothing but capabilities.
struct Nothing;

/// A token nobody gets.
enum Never {}

impl smoltcp::phy::Device for Nothing {
    type RxToken<'a> = Never;
    type TxToken<'a> = Never;

    fn receive(&mut self, _: Instant) -> Option<(Never, Never)> {
        None
    }

    fn transmit(&mut self, _: Instant) -> Option<Never> {
        None
    }

    fn capabilities(&self) -> smoltcp::phy::DeviceCapabilities {
        capabilities()
    }
}

impl smoltcp::phy::RxToken for Never {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, _: F) -> R {
        match self {}
    }
}

impl smoltcp::phy::TxToken for Never {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, _: usize, _: F) -> R {
        match self {}
    }
}
