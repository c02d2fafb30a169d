//! A guest made of single frames on a true tap: it sends what no kernel would, and hears octet by octet.

use crate::frames;
use crate::pump::wait_for;
use crate::raw::{Reply, Segment};
use crate::tap::{Tap, VNET_HDR_LEN};
use anyhow::{Context as _, Result, bail, ensure};
use metadata_common::mac::Mac;
use metadata_common::wire::ethernet;
use smoltcp::wire::TcpControl;
use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What precedes every frame of a tap with virtio headers (`struct virtio_net_hdr`).
pub type Header = [u8; VNET_HDR_LEN];

/// Longest frame a tap gives: a whole IP packet and its Ethernet header, as segmentation offload leaves it.
const LONGEST: usize = VNET_HDR_LEN + 14 + 65_535;
/// Before a segment that nobody answered is sent again.
const AGAIN: Duration = Duration::from_secs(1);
/// Longest one exchange may take.
pub const PATIENCE: Duration = Duration::from_secs(15);
/// First port a station speaks from.
const FIRST_PORT: u16 = 20_000;

/// A pretend guest that owns its tap.
#[derive(Debug)]
pub struct Station {
    tap: Arc<Tap>,
    /// Its MAC.
    pub mac: Mac,
    /// Its IPv4 address.
    pub address: Ipv4Addr,
    /// What stands before a frame unless it is told otherwise.
    pub header: Header,
    /// Frames the tap took, and octets in them.
    pub sent: Cell<(u64, u64)>,
    /// Frames heard, and octets in them.
    pub heard: (u64, u64),
    /// Keep every frame heard.
    pub remembers: bool,
    /// The tap's queue it sends by; it hears on all.
    pub queue: usize,
    transcript: Vec<Vec<u8>>,
    buffer: Vec<u8>,
    port: u16,
}

impl Station {
    /// A guest with this address on a tap.
    #[must_use]
    pub fn new(tap: Arc<Tap>, mac: Mac, address: Ipv4Addr) -> Self {
        Self {
            tap,
            mac,
            address,
            header: [0; VNET_HDR_LEN],
            sent: Cell::default(),
            heard: (0, 0),
            remembers: false,
            queue: 0,
            transcript: Vec::new(),
            buffer: vec![0; LONGEST],
            port: FIRST_PORT,
        }
    }

    /// The tap.
    #[must_use]
    pub fn tap(&self) -> &Arc<Tap> {
        &self.tap
    }

    /// Its link-local IPv6 address (RFC 4291, appendix A).
    #[must_use]
    pub fn address_v6(&self) -> Ipv6Addr {
        let [a, b, c, d, e, f] = self.mac.0.map(u16::from);
        Ipv6Addr::new(0xfe80, 0, 0, 0, (a ^ 2) << 8 | b, c << 8 | 0xff, 0xfe00 | d, e << 8 | f)
    }

    /// A port not spoken from before, until all are used up.
    pub fn next_port(&mut self) -> u16 {
        self.port = self.port.checked_add(1).unwrap_or(FIRST_PORT);
        self.port
    }

    /// Sends a frame as it is. False: the tap had no room, or no such frame may exist (`EINVAL`).
    ///
    /// # Errors
    /// As `write(2)`, `EINVAL` excepted.
    pub fn send(&self, frame: &[u8]) -> Result<bool> {
        self.send_on(self.queue, &self.header, frame)
    }

    /// The same on one of the tap's queues, behind this header where the tap has headers.
    ///
    /// # Errors
    /// As for [`Station::send`].
    pub fn send_on(&self, queue: usize, header: &Header, frame: &[u8]) -> Result<bool> {
        let sent = if self.tap.shape().vnet_hdr {
            self.tap.send(queue, &[header, frame].concat())
        } else {
            self.tap.send(queue, frame)
        };
        match sent {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
            other => {
                let taken = other.with_context(|| format!("sending by {}", self.tap.name()))?;
                let (frames, octets) = self.sent.get();
                if taken {
                    self.sent.set((frames + 1, octets + frame.len() as u64));
                }
                Ok(taken)
            }
        }
    }

    /// Sends a segment with its own MAC as source.
    ///
    /// # Errors
    /// As for [`Station::send`].
    pub fn say(&self, segment: &Segment) -> Result<()> {
        self.send(&self.frame(segment)).map(drop)
    }

    /// A segment's frame with its own MAC as source.
    #[must_use]
    pub fn frame(&self, segment: &Segment) -> Vec<u8> {
        frames::with(segment.frame(0), ethernet::SOURCE, &self.mac.0)
    }

    /// All that has come by now, on every queue.
    ///
    /// # Errors
    /// As `read(2)`.
    pub fn hear(&mut self) -> Result<Vec<Vec<u8>>> {
        let prefix = if self.tap.shape().vnet_hdr { VNET_HDR_LEN } else { 0 };
        let mut heard = Vec::new();
        for queue in 0..self.tap.shape().queues {
            while let Some(len) = self.tap.receive(queue, &mut self.buffer)? {
                heard.push(self.buffer[prefix..len].to_vec());
            }
        }
        self.heard.0 += heard.len() as u64;
        self.heard.1 += heard.iter().map(|frame| frame.len() as u64).sum::<u64>();
        if self.remembers {
            self.transcript.extend(heard.iter().cloned());
        }
        Ok(heard)
    }

    /// Waits until nothing has come for a while: the last acknowledgements of what is over.
    ///
    /// # Errors
    /// As for [`Station::hear`].
    pub fn fall_silent(&mut self) -> Result<()> {
        const SILENCE: Duration = Duration::from_millis(100);
        loop {
            self.wait(SILENCE);
            if self.hear()?.is_empty() {
                return Ok(());
            }
        }
    }

    /// Every frame heard since the last look, if it [remembers](Self::remembers).
    pub fn transcript(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.transcript)
    }

    /// Waits until something comes, or the time is over.
    pub fn wait(&self, most: Duration) {
        let mut polled: Vec<libc::pollfd> = self
            .tap
            .descriptors()
            .map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 })
            .collect();
        wait_for(&mut polled, most.as_millis().min(60_000) as i32 + 1);
    }

    /// The segments for it among what has come by now.
    ///
    /// # Errors
    /// As for [`Station::hear`].
    pub fn segments(&mut self) -> Result<Vec<Reply>> {
        let own = self.mac.0;
        let mut heard = self.hear()?;
        // What a bridge floods may be anything.
        heard.retain(|frame| frame.starts_with(&own) && is_tcp(frame));
        Ok(heard.iter().map(|frame| Reply::read(frame)).collect())
    }

    /// A conversation not yet begun, from its own address and a port of its own.
    pub fn talk(&mut self, to: (IpAddr, u16)) -> Talk {
        let from = if to.0.is_ipv4() { self.address.into() } else { self.address_v6().into() };
        let port = self.next_port();
        Talk::new((from, port), to)
    }

    /// Shakes hands.
    ///
    /// # Errors
    /// Refused, or no answer in [`PATIENCE`].
    pub fn open(&mut self, to: (IpAddr, u16)) -> Result<Talk> {
        let mut talk = self.talk(to);
        self.begin(&mut talk)?;
        Ok(talk)
    }

    /// Shakes hands on a connection that has not begun.
    ///
    /// # Errors
    /// As for [`Station::open`].
    pub fn begin(&mut self, talk: &mut Talk) -> Result<()> {
        let syn = talk.syn();
        self.until(talk, &[syn], |talk| talk.open)?;
        self.say(&talk.ack())
    }

    /// One request on a connection of its own, and all that comes until the service closes it.
    ///
    /// # Errors
    /// Refused or reset, or no end in [`PATIENCE`].
    pub fn ask(&mut self, to: (IpAddr, u16), octets: &[u8]) -> Result<Vec<u8>> {
        let mut talk = self.talk(to);
        self.exchange(&mut talk, octets)?;
        Ok(talk.received)
    }

    /// The same on a connection that has not begun.
    ///
    /// # Errors
    /// As for [`Station::ask`].
    pub fn exchange<'t>(&mut self, talk: &'t mut Talk, octets: &[u8]) -> Result<&'t [u8]> {
        self.begin(talk)?;
        let said = talk.say(octets);
        self.until(talk, &said, |talk| talk.ended)?;
        self.say(&talk.finish())?;
        Ok(&talk.received)
    }

    /// Sends segments, and again each second, until `done`; acknowledges whatever comes.
    ///
    /// # Errors
    /// Reset, or not done in [`PATIENCE`].
    pub fn until(&mut self, talk: &mut Talk, said: &[Segment], done: impl Fn(&Talk) -> bool) -> Result<()> {
        let start = Instant::now();
        let mut sent: Option<Instant> = None;
        while start.elapsed() < PATIENCE {
            if sent.is_none_or(|at| at.elapsed() >= AGAIN) {
                said.iter().try_for_each(|segment| self.say(segment))?;
                sent = Some(Instant::now());
            }
            self.wait(Duration::from_millis(50));
            for reply in self.segments()? {
                if !talk.is_theirs(&reply) {
                    continue;
                }
                if talk.take(&reply) {
                    self.say(&talk.ack())?;
                }
                ensure!(!talk.reset, "{:?} reset by the service", talk.local);
            }
            if done(talk) {
                return Ok(());
            }
        }
        bail!("{:?} to {:?}: {} octets, no end in {PATIENCE:?}", talk.local, talk.remote, talk.received.len())
    }
}

/// True for a frame with a TCP segment.
#[must_use]
pub fn is_tcp(frame: &[u8]) -> bool {
    match frame.get(12..14) {
        Some([0x08, 0x00]) => frame.get(23) == Some(&6),
        Some([0x86, 0xdd]) => frame.get(20) == Some(&6),
        _ => false,
    }
}

/// A guest's half of one connection: its numbers, and what it has heard.
#[derive(Clone, Debug)]
pub struct Talk {
    /// The guest's address and port.
    pub local: (IpAddr, u16),
    /// The service's.
    pub remote: (IpAddr, u16),
    /// The next number to send.
    pub seq: u32,
    /// The next number expected.
    pub ack: u32,
    /// The window to offer.
    pub window: u16,
    /// The MSS to announce.
    pub mss: Option<u16>,
    /// Where frames go.
    pub to: Mac,
    /// The SYN was answered.
    pub open: bool,
    /// The service has closed its side.
    pub ended: bool,
    /// The service has given it up.
    pub reset: bool,
    /// What of ours the service has acknowledged.
    pub acknowledged: u32,
    /// Octets beyond that it takes.
    pub room: usize,
    /// What the service has said.
    pub received: Vec<u8>,
}

impl Talk {
    /// One that has not begun.
    #[must_use]
    pub fn new(local: (IpAddr, u16), remote: (IpAddr, u16)) -> Self {
        Self {
            local,
            remote,
            seq: fastrand::u32(..),
            ack: 0,
            window: 65_535,
            mss: Some(1460),
            to: Mac::SERVICE,
            open: false,
            ended: false,
            reset: false,
            acknowledged: 0,
            room: 0,
            received: Vec::new(),
        }
    }

    fn bare(&self) -> Segment {
        Segment {
            to: self.to,
            source: self.local,
            destination: self.remote,
            window: self.window,
            ..Segment::ack(0, self.seq, self.ack)
        }
    }

    /// The SYN.
    #[must_use]
    pub fn syn(&self) -> Segment {
        Segment { ack: None, mss: self.mss, ..self.bare().control(TcpControl::Syn) }
    }

    /// An acknowledgement of all that came.
    #[must_use]
    pub fn ack(&self) -> Segment {
        self.bare()
    }

    /// The FIN.
    #[must_use]
    pub fn finish(&self) -> Segment {
        self.bare().control(TcpControl::Fin)
    }

    /// A reset the service believes.
    #[must_use]
    pub fn reset(&self) -> Segment {
        self.bare().control(TcpControl::Rst)
    }

    /// The segments that say these octets; they count as said from now on.
    #[must_use]
    pub fn say(&mut self, octets: &[u8]) -> Vec<Segment> {
        const SEGMENT: usize = 1400;
        octets
            .chunks(SEGMENT)
            .map(|part| {
                let said = self.bare().with(part);
                self.seq = self.seq.wrapping_add(part.len() as u32);
                said
            })
            .collect()
    }

    /// Octets said and not acknowledged yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.seq.wrapping_sub(self.acknowledged) as usize
    }

    /// True while there is somebody to talk to.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.open && !self.ended && !self.reset
    }

    /// True for a segment of this connection.
    #[must_use]
    pub fn is_theirs(&self, reply: &Reply) -> bool {
        reply.addresses == (self.remote.0, self.local.0) && reply.ports == (self.remote.1, self.local.1)
    }

    /// Takes in a segment of the service; true when it wants an acknowledgement.
    pub fn take(&mut self, reply: &Reply) -> bool {
        let (syn, _, fin, reset) = reply.flags;
        self.reset |= reset;
        self.acknowledged = reply.ack;
        // Our windows are never shifted: no SYN of ours says how far.
        self.room = reply.window.into();
        if reset {
            return false;
        }
        if syn {
            if !self.open {
                self.open = true;
                self.seq = self.seq.wrapping_add(1);
                self.ack = reply.seq.wrapping_add(1);
            }
            return false;
        }
        if reply.seq == self.ack && !self.ended {
            self.received.extend_from_slice(&reply.payload);
            self.ack = self.ack.wrapping_add(reply.payload.len() as u32 + u32::from(fin));
            self.ended = fin;
        }
        fin || !reply.payload.is_empty()
    }
}

/// Status and body of an answer that ended with its connection.
///
/// # Errors
/// It is no whole answer.
pub fn answer(received: &[u8]) -> Result<(u16, Vec<u8>)> {
    let end = received.windows(4).position(|at| at == b"\r\n\r\n").context("the answer has no head")?;
    let status = std::str::from_utf8(received.get(9..12).context("no status")?)?.parse()?;
    Ok((status, received[end + 4..].to_vec()))
}

/// A GET that asks for the connection to be closed after it.
#[must_use]
pub fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: metadata\r\nConnection: close\r\n\r\n").into_bytes()
}
