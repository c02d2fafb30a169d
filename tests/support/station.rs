//! A guest that sends and receives single frames on a real tap, also frames that no kernel would send.

use anyhow::{Context as _, Result, bail, ensure};
use metadata_common::mac::Mac;
use metadata_common::wire::ethernet;
use smoltcp::wire::TcpControl;
use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::frames;
use crate::pump::wait_for;
use crate::raw::{Reply, Segment};
use crate::tap::{Tap, VNET_HDR_LEN};

/// The header before every frame of a tap with virtio headers (`struct virtio_net_hdr`).
pub type Header = [u8; VNET_HDR_LEN];

/// Maximum length of a frame from a tap: with segmentation offload a whole IP packet and its Ethernet header.
const LONGEST: usize = VNET_HDR_LEN + 14 + 65_535;
/// Time until a segment without an answer is sent again.
const AGAIN: Duration = Duration::from_secs(1);
/// Limit for one exchange.
pub const PATIENCE: Duration = Duration::from_secs(15);
/// First source port of a station.
const FIRST_PORT: u16 = 20_000;

/// A simulated guest that owns its tap.
#[derive(Debug)]
pub struct Station {
    tap: Arc<Tap>,
    /// Its MAC.
    pub mac: Mac,
    /// Its IPv4 address.
    pub address: Ipv4Addr,
    /// The default header before a frame.
    pub header: Header,
    /// Frames that the tap accepted, and their bytes.
    pub sent: Cell<(u64, u64)>,
    /// Received frames, and their bytes.
    pub received: (u64, u64),
    /// Whether to keep every received frame.
    pub remembers: bool,
    /// The tap's queue for sending. The station receives on all queues.
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
            received: (0, 0),
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

    /// A source port that was not used before, until all have been used.
    pub fn next_port(&mut self) -> u16 {
        self.port = self.port.checked_add(1).unwrap_or(FIRST_PORT);
        self.port
    }

    /// Sends a frame unchanged. Returns false if the tap is full or refuses the frame as invalid (`EINVAL`).
    ///
    /// # Errors
    /// Those of `write(2)` except `EINVAL`.
    pub fn send(&self, frame: &[u8]) -> Result<bool> {
        self.send_on(self.queue, &self.header, frame)
    }

    /// Sends a frame on one of the tap's queues, with this header if the tap has headers.
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
                let (frames, bytes) = self.sent.get();
                if taken {
                    self.sent.set((frames + 1, bytes + frame.len() as u64));
                }
                Ok(taken)
            }
        }
    }

    /// Sends a segment from the station's MAC.
    ///
    /// # Errors
    /// As for [`Station::send`].
    pub fn transmit(&self, segment: &Segment) -> Result<()> {
        self.send(&self.frame(segment)).map(drop)
    }

    /// The frame of a segment from the station's MAC.
    #[must_use]
    pub fn frame(&self, segment: &Segment) -> Vec<u8> {
        frames::with(segment.frame(0), ethernet::SOURCE, &self.mac.0)
    }

    /// Reads all frames that have arrived, on every queue.
    ///
    /// # Errors
    /// Those of `read(2)`.
    pub fn receive(&mut self) -> Result<Vec<Vec<u8>>> {
        let prefix = if self.tap.shape().vnet_hdr { VNET_HDR_LEN } else { 0 };
        let mut heard = Vec::new();
        for queue in 0..self.tap.shape().queues {
            while let Some(len) = self.tap.receive(queue, &mut self.buffer)? {
                heard.push(self.buffer[prefix..len].to_vec());
            }
        }
        self.received.0 += heard.len() as u64;
        self.received.1 += heard.iter().map(|frame| frame.len() as u64).sum::<u64>();
        if self.remembers {
            self.transcript.extend(heard.iter().cloned());
        }
        Ok(heard)
    }

    /// Reads until no frame arrives for 100 ms, so that late acknowledgements of ended connections are gone.
    ///
    /// # Errors
    /// As for [`Station::receive`].
    pub fn drain(&mut self) -> Result<()> {
        const SILENCE: Duration = Duration::from_millis(100);
        loop {
            self.wait(SILENCE);
            if self.receive()?.is_empty() {
                return Ok(());
            }
        }
    }

    /// Every frame received since the last call, if [`remembers`](Self::remembers) is set.
    pub fn transcript(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.transcript)
    }

    /// Waits until a frame arrives, or `most` has passed.
    pub fn wait(&self, most: Duration) {
        let mut polled: Vec<libc::pollfd> = self
            .tap
            .descriptors()
            .map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 })
            .collect();
        wait_for(&mut polled, most.as_millis().min(60_000) as i32 + 1);
    }

    /// Reads the TCP segments to the station's MAC that have arrived.
    ///
    /// # Errors
    /// As for [`Station::receive`].
    pub fn segments(&mut self) -> Result<Vec<Reply>> {
        let own = self.mac.0;
        let mut heard = self.receive()?;
        // A bridge floods frames of every kind.
        heard.retain(|frame| frame.starts_with(&own) && is_tcp(frame));
        Ok(heard.iter().map(|frame| Reply::read(frame)).collect())
    }

    /// A connection that has not begun, from the station's address and a new port.
    pub fn talk(&mut self, to: (IpAddr, u16)) -> Talk {
        let from = if to.0.is_ipv4() { self.address.into() } else { self.address_v6().into() };
        let port = self.next_port();
        Talk::new((from, port), to)
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// The connection is refused, or has no answer within [`PATIENCE`].
    pub fn open(&mut self, to: (IpAddr, u16)) -> Result<Talk> {
        let mut talk = self.talk(to);
        self.begin(&mut talk)?;
        Ok(talk)
    }

    /// Opens a connection that [`Station::talk`] has returned.
    ///
    /// # Errors
    /// As for [`Station::open`].
    pub fn begin(&mut self, talk: &mut Talk) -> Result<()> {
        let syn = talk.syn();
        self.until(talk, &[syn], |talk| talk.open)?;
        self.transmit(&talk.ack())
    }

    /// Sends one request on a new connection. Returns everything received until the service closes the connection.
    ///
    /// # Errors
    /// The connection is refused or reset, or does not end within [`PATIENCE`].
    pub fn ask(&mut self, to: (IpAddr, u16), bytes: &[u8]) -> Result<Vec<u8>> {
        let mut talk = self.talk(to);
        self.exchange(&mut talk, bytes)?;
        Ok(talk.received)
    }

    /// Sends one request on a connection that has not begun.
    ///
    /// # Errors
    /// As for [`Station::ask`].
    pub fn exchange<'t>(&mut self, talk: &'t mut Talk, bytes: &[u8]) -> Result<&'t [u8]> {
        self.begin(talk)?;
        let said = talk.transmit(bytes);
        self.until(talk, &said, |talk| talk.ended)?;
        self.transmit(&talk.finish())?;
        Ok(&talk.received)
    }

    /// Sends segments every second until `done` returns true. Acknowledges all data.
    ///
    /// # Errors
    /// The connection is reset, or `done` does not return true within [`PATIENCE`].
    pub fn until(&mut self, talk: &mut Talk, said: &[Segment], done: impl Fn(&Talk) -> bool) -> Result<()> {
        let start = Instant::now();
        let mut sent: Option<Instant> = None;
        while start.elapsed() < PATIENCE {
            if sent.is_none_or(|at| at.elapsed() >= AGAIN) {
                said.iter().try_for_each(|segment| self.transmit(segment))?;
                sent = Some(Instant::now());
            }
            self.wait(Duration::from_millis(50));
            for reply in self.segments()? {
                if !talk.is_theirs(&reply) {
                    continue;
                }
                if talk.take(&reply) {
                    self.transmit(&talk.ack())?;
                }
                ensure!(!talk.reset, "{:?} reset by the service", talk.local);
            }
            if done(talk) {
                return Ok(());
            }
        }
        bail!("{:?} to {:?}: {} bytes, no end in {PATIENCE:?}", talk.local, talk.remote, talk.received.len())
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

/// The guest's side of one connection.
#[derive(Clone, Debug)]
pub struct Talk {
    /// The guest's address and port.
    pub local: (IpAddr, u16),
    /// The service's address and port.
    pub remote: (IpAddr, u16),
    /// The next sequence number to send.
    pub seq: u32,
    /// The next sequence number expected.
    pub ack: u32,
    /// The window to offer.
    pub window: u16,
    /// The MSS to announce.
    pub mss: Option<u16>,
    /// The destination MAC.
    pub to: Mac,
    /// True once the SYN has been answered.
    pub open: bool,
    /// True once the service has closed its side.
    pub ended: bool,
    /// True once the service has reset the connection.
    pub reset: bool,
    /// The acknowledgement number of the service's last segment.
    pub acknowledged: u32,
    /// The service's window, in bytes.
    pub room: usize,
    /// The payload received.
    pub received: Vec<u8>,
}

impl Talk {
    /// A connection that has not begun.
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

    /// An acknowledgement of everything received.
    #[must_use]
    pub fn ack(&self) -> Segment {
        self.bare()
    }

    /// The FIN.
    #[must_use]
    pub fn finish(&self) -> Segment {
        self.bare().control(TcpControl::Fin)
    }

    /// A reset with the next sequence number.
    #[must_use]
    pub fn reset(&self) -> Segment {
        self.bare().control(TcpControl::Rst)
    }

    /// The segments that carry these bytes. Advances the next sequence number.
    #[must_use]
    pub fn transmit(&mut self, bytes: &[u8]) -> Vec<Segment> {
        const SEGMENT: usize = 1400;
        bytes
            .chunks(SEGMENT)
            .map(|part| {
                let said = self.bare().with(part);
                self.seq = self.seq.wrapping_add(part.len() as u32);
                said
            })
            .collect()
    }

    /// Number of unacknowledged bytes.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.seq.wrapping_sub(self.acknowledged) as usize
    }

    /// True if the connection is open, and the service has neither closed nor reset it.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.open && !self.ended && !self.reset
    }

    /// True for a segment of this connection.
    #[must_use]
    pub fn is_theirs(&self, reply: &Reply) -> bool {
        reply.addresses == (self.remote.0, self.local.0) && reply.ports == (self.remote.1, self.local.1)
    }

    /// Processes a segment of the service. Returns true if it needs an acknowledgement.
    pub fn take(&mut self, reply: &Reply) -> bool {
        let (syn, _, fin, reset) = reply.flags;
        self.reset |= reset;
        self.acknowledged = reply.ack;
        // The guest's SYN has no window scale option, so windows are not shifted.
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
/// The answer is incomplete.
pub fn answer(received: &[u8]) -> Result<(u16, Vec<u8>)> {
    let end = received.windows(4).position(|at| at == b"\r\n\r\n").context("the answer has no head")?;
    let status = std::str::from_utf8(received.get(9..12).context("no status")?)?.parse()?;
    Ok((status, received[end + 4..].to_vec()))
}

/// A GET with `Connection: close`.
#[must_use]
pub fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: metadata\r\nConnection: close\r\n\r\n").into_bytes()
}

// Many connections of one guest at once, each as slow, greedy or silent as the test requires.

/// Payload of one segment, in bytes.
const SEGMENT: usize = 1_400;
/// Time until an unacknowledged segment is retransmitted.
const REPEAT_AFTER: Duration = Duration::from_millis(500);
/// Number of SYNs to send before the answers are read.
const SYNS: usize = 64;

/// Connections of one guest.
#[derive(Debug)]
pub struct Mob<'s> {
    /// The guest.
    pub station: &'s mut Station,
    /// Its connections, by index.
    pub talks: Vec<Talk>,
    /// Peak number of bytes that the service had acknowledged on connections without an answer.
    pub most_held: usize,
}

impl<'s> Mob<'s> {
    /// Opens this many connections.
    ///
    /// # Errors
    /// When an answer is missing.
    pub fn open(station: &'s mut Station, to: (IpAddr, u16), count: usize) -> Result<Self> {
        Self::open_with(station, to, count, |_| {})
    }

    /// Opens connections after `change` has adapted them.
    ///
    /// # Errors
    /// When an answer is missing.
    pub fn open_with(
        station: &'s mut Station,
        to: (IpAddr, u16),
        count: usize,
        change: impl Fn(&mut Talk),
    ) -> Result<Self> {
        let mut mob = Self { talks: Vec::with_capacity(count), station, most_held: 0 };
        for _ in 0..count {
            let mut talk = mob.station.talk(to);
            change(&mut talk);
            mob.talks.push(talk);
        }
        let start = Instant::now();
        while mob.talks.iter().any(|talk| !talk.open) {
            ensure!(start.elapsed() < PATIENCE, "a handshake has no answer after {PATIENCE:?}");
            for at in 0..mob.talks.len() {
                if !mob.talks[at].open {
                    mob.station.transmit(&mob.talks[at].syn())?;
                }
                if at % SYNS == SYNS - 1 {
                    mob.listen(Duration::ZERO, true)?;
                }
            }
            let until = Instant::now() + REPEAT_AFTER;
            while Instant::now() < until && mob.talks.iter().any(|talk| !talk.open) {
                mob.listen(Duration::from_millis(10), true)?;
            }
        }
        Ok(mob)
    }

    /// Sends a segment.
    ///
    /// # Errors
    /// As for [`Station::transmit`].
    pub fn transmit(&self, segment: &Segment) -> Result<()> {
        self.station.transmit(segment)
    }

    /// Waits for segments, for `most` at the longest, and processes them. Acknowledges them if `acknowledges` is true.
    /// Returns their number.
    ///
    /// # Errors
    /// As for [`Station::receive`].
    pub fn listen(&mut self, most: Duration, acknowledges: bool) -> Result<usize> {
        if !most.is_zero() {
            self.station.wait(most);
        }
        let replies = self.station.segments()?;
        for reply in &replies {
            let Some(talk) = self.talks.iter_mut().find(|talk| talk.is_theirs(reply)) else { continue };
            if talk.take(reply) && acknowledges {
                let ack = talk.ack();
                self.station.transmit(&ack)?;
            }
        }
        Ok(replies.len())
    }

    /// Receives until `done` returns true, for `most` at the longest. Returns the last result of `done`.
    ///
    /// # Errors
    /// As for [`Station::receive`].
    pub fn until(&mut self, most: Duration, done: impl Fn(&[Talk]) -> bool) -> Result<bool> {
        let start = Instant::now();
        while start.elapsed() < most {
            if done(&self.talks) {
                return Ok(true);
            }
            self.listen(Duration::from_millis(20), true)?;
        }
        Ok(done(&self.talks))
    }

    /// Sends this many bytes on every open connection while the service accepts them, for `most` at the longest. The
    /// bytes are produced on demand. Returns the number of acknowledged bytes.
    ///
    /// # Errors
    /// As for [`Station::receive`].
    pub fn pour(&mut self, bytes: usize, most: Duration, make: impl Fn(usize) -> u8) -> Result<u64> {
        let first: Vec<u32> = self.talks.iter().map(|talk| talk.seq).collect();
        // Unacknowledged segments, and when each was last sent.
        let mut waiting: Vec<(Vec<Segment>, Instant)> =
            first.iter().map(|_| (Vec::new(), Instant::now())).collect();
        let start = Instant::now();
        let said = |talk: &Talk, first: u32| talk.seq.wrapping_sub(first) as usize;
        while start.elapsed() < most {
            let mut is_over = true;
            for at in 0..self.talks.len() {
                let (segments, sent) = &mut waiting[at];
                let talk = &mut self.talks[at];
                if !talk.is_live() {
                    continue;
                }
                segments.retain(|segment| {
                    let end = segment.seq.wrapping_add(segment.payload.len() as u32);
                    end.wrapping_sub(talk.acknowledged) as i32 > 0
                });
                let done = said(talk, first[at]);
                is_over &= done >= bytes && segments.is_empty();
                let room = talk.room.saturating_sub(talk.in_flight()).min(SEGMENT);
                if done < bytes && room > 0 {
                    let part: Vec<u8> = (done..bytes.min(done + room)).map(&make).collect();
                    segments.extend(talk.transmit(&part));
                    *sent = Instant::now() - REPEAT_AFTER;
                }
                if !segments.is_empty() && sent.elapsed() >= REPEAT_AFTER {
                    segments.iter().try_for_each(|segment| self.station.transmit(segment))?;
                    *sent = Instant::now();
                }
            }
            if is_over {
                break;
            }
            self.listen(Duration::from_millis(5), true)?;
            let unanswered = self.talks.iter().zip(&first).filter(|(talk, _)| talk.received.is_empty());
            let held = unanswered.filter(|(talk, _)| talk.is_live());
            let held: usize = held.map(|(talk, first)| said(talk, *first) - talk.in_flight()).sum();
            self.most_held = self.most_held.max(held);
        }
        let talks = self.talks.iter().zip(&first).zip(&waiting);
        Ok(talks
            .map(|((talk, first), (segments, _))| {
                let unheard: usize = segments.iter().map(|segment| segment.payload.len()).sum();
                (said(talk, *first) - unheard) as u64
            })
            .sum())
    }

    /// Ends all connections. A connection gets a FIN if the service has closed its side and acknowledged everything.
    /// All others get a reset with the number that the service expects. A FIN is repeated until it is acknowledged,
    /// because the port's limit can drop it. An accepted reset gets no answer. A reset that crosses an acknowledgement
    /// gets a challenge (RFC 5961 §3.2). The reset is repeated with the challenge's number (RFC 9293 §3.10.7.1).
    ///
    /// # Errors
    /// As for [`Station::receive`].
    pub fn leave(self) -> Result<()> {
        let open = self.talks.into_iter().filter(|talk| talk.open && !talk.reset);
        let (mut finished, given_up): (Vec<_>, Vec<_>) =
            open.partition(|talk| talk.ended && talk.in_flight() == 0);
        for talk in &given_up {
            self.station.transmit(&Segment { seq: talk.acknowledged, ..talk.reset() })?;
        }
        let (start, mut is_challenged) = (Instant::now(), !given_up.is_empty());
        while (!finished.is_empty() || is_challenged) && start.elapsed() < PATIENCE {
            finished.iter().try_for_each(|talk| self.station.transmit(&talk.finish()))?;
            let said = Instant::now();
            is_challenged = false;
            while !(finished.is_empty() && given_up.is_empty()) && said.elapsed() < REPEAT_AFTER {
                self.station.wait(Duration::from_millis(10));
                for reply in self.station.segments()? {
                    let is_over = |talk: &Talk| reply.flags.3 || reply.ack == talk.seq.wrapping_add(1);
                    finished.retain(|talk| !(talk.is_theirs(&reply) && is_over(talk)));
                    let challenged = given_up.iter().find(|talk| talk.is_theirs(&reply) && !reply.flags.3);
                    if let Some(talk) = challenged {
                        is_challenged = true;
                        self.station.transmit(&Segment { seq: reply.ack, ..talk.reset() })?;
                    }
                }
            }
        }
        Ok(())
    }
}
