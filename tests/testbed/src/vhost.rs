//! The guest's end of vhost-net: what a virtio NIC's driver and QEMU do for one pair of queues of a tap.
//!
//! Every production guest sends this way. Its driver writes frames to memory that a thread of the kernel shares, and that
//! thread gives them to the tap in batches. Otherwise [`Tap::send`](crate::tap::Tap::send) makes a system call for each
//! frame. The rings are split virtqueues (virtio 1.2, section 2.7) with mergeable receive buffers, as QEMU's guests
//! have them, in the order of bytes of this machine, which must be little-endian.
#![expect(unsafe_code, reason = "vhost-net is configured by ioctl, which has no safe form in std or rustix")]

use crate::privileged;
use anyhow::{Context as _, Result, ensure};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

/// The device. It belongs to the module `vhost_net`.
pub const DEVICE: &str = "/dev/vhost-net";
const REMEDY: &str = "`modprobe vhost_net` may help";
/// Bytes of `struct virtio_net_hdr_v1`, the header of every frame on the rings.
pub const HEADER: usize = 12;

/// Buffers of a ring. QEMU's default.
pub const ENTRIES: u16 = 256;
/// Bytes of a buffer. A longer frame takes several.
const SLOT: usize = 2_048;
/// Bytes of the part of the header that a tap without vhost has, too; `num_buffers` follows.
const SHARED_HEADER: usize = crate::tap::VNET_HDR_LEN;
/// The longest wait for room on the ring for sending, before the frame is refused. A driver would stop its queue.
const ROOM: Duration = Duration::from_secs(1);
/// Pairs of rings, by their index: what the guest receives, what it sends.
const RECEIVE: u32 = 0;
const SEND: u32 = 1;

/// `VIRTIO_F_VERSION_1` and `VIRTIO_NET_F_MRG_RXBUF` (Linux: include/uapi/linux/virtio_config.h, virtio_net.h).
const FEATURES: u64 = 1 << 32 | 1 << 15;
/// The buffer goes on in the next descriptor (`VRING_DESC_F_NEXT`).
const GOES_ON: u64 = 1;
/// The device may write to the buffer (`VRING_DESC_F_WRITE`).
const WRITABLE: u64 = 2;
/// The device looks at the ring by itself and needs no kick (`VRING_USED_F_NO_NOTIFY`).
const NO_NOTIFY: u64 = 1;

/// Requests from include/uapi/linux/vhost.h. Their numbers contain the direction and the size of the argument.
mod request {
    pub(super) const GET_FEATURES: u32 = 0x8008_af00;
    pub(super) const SET_FEATURES: u32 = 0x4008_af00;
    pub(super) const SET_OWNER: u32 = 0x0000_af01;
    pub(super) const SET_MEM_TABLE: u32 = 0x4008_af03;
    pub(super) const SET_VRING_NUM: u32 = 0x4008_af10;
    pub(super) const SET_VRING_ADDR: u32 = 0x4028_af11;
    pub(super) const SET_VRING_BASE: u32 = 0x4008_af12;
    pub(super) const SET_VRING_KICK: u32 = 0x4008_af20;
    pub(super) const SET_VRING_CALL: u32 = 0x4008_af21;
    pub(super) const SET_BACKEND: u32 = 0x4008_af30;
}

/// `struct vhost_memory` with two regions.
#[repr(C)]
struct Memory {
    regions: u32,
    padding: u32,
    table: [Region; 2],
}

/// `struct vhost_memory_region`.
#[repr(C)]
struct Region {
    guest: u64,
    len: u64,
    user: u64,
    flags: u64,
}

/// `struct vhost_vring_state`, and `struct vhost_vring_file` with a descriptor as its value.
#[repr(C)]
struct State {
    index: u32,
    value: u32,
}

/// `struct vhost_vring_addr`.
#[repr(C)]
struct Addresses {
    index: u32,
    flags: u32,
    descriptors: u64,
    used: u64,
    available: u64,
    log: u64,
}

/// Why this process cannot use vhost-net, with a remedy; `None` if it can.
#[must_use]
pub fn missing() -> Option<String> {
    let opened = OpenOptions::new().read(true).write(true).open(DEVICE);
    opened.err().map(|error| format!("cannot open {DEVICE}: {error}; {REMEDY}"))
}

/// True if the calling test can use vhost-net. Otherwise the test is listed as not available, and must return at once.
/// Unlike a missing privilege this fails no test anywhere but in `cargo xtask kernels`, since many machines lack the
/// module.
///
/// # Panics
/// Like [`privileged::or_skip`] without the privileges.
#[must_use]
#[track_caller]
pub fn or_skip() -> bool {
    match missing() {
        Some(reason) if privileged::missing().is_none() => {
            privileged::not_available(&format!("it {reason}, and `cargo xtask kernels` has kernels with it"));
            false
        }
        _ => privileged::or_skip(),
    }
}

/// A pair of rings between a guest and one queue of its tap. Drop ends the kernel's thread.
#[derive(Debug)]
pub struct Vhost {
    device: File,
    receive: Ring,
    send: Ring,
    /// Descriptors of the ring for sending that hold no frame.
    free: Vec<u16>,
    /// How many descriptors the frame has that begins at each.
    lengths: Vec<u16>,
    frame: Vec<u8>,
}

impl Vhost {
    /// Attaches to a queue of a tap with virtio headers of [`HEADER`] bytes.
    ///
    /// # Errors
    /// Fails if there is no [`DEVICE`], or it refuses the tap, such as one that another thread of vhost uses.
    pub fn attach(queue: BorrowedFd<'_>) -> Result<Self> {
        let open = OpenOptions::new().read(true).write(true).open(DEVICE);
        let device = open.with_context(|| format!("cannot open {DEVICE}; {REMEDY}"))?;
        let [mut receive, send] = [Ring::new()?, Ring::new()?];
        for slot in 0..ENTRIES {
            receive.describe(slot, SLOT, WRITABLE, 0);
            receive.offer(slot);
        }
        let mut vhost = Self {
            device,
            receive,
            send,
            free: (0..ENTRIES).collect(),
            lengths: vec![0; ENTRIES.into()],
            frame: Vec::new(),
        };
        vhost.configure(queue).context("vhost-net refuses its setup")?;
        vhost.receive.publish().context("cannot wake vhost-net")?;
        Ok(vhost)
    }

    fn configure(&mut self, queue: BorrowedFd<'_>) -> Result<()> {
        // VHOST_SET_OWNER takes no argument and ignores what it gets.
        self.ioctl(request::SET_OWNER, &mut 0_u64).context("VHOST_SET_OWNER")?;
        let mut features = 0_u64;
        self.ioctl(request::GET_FEATURES, &mut features).context("VHOST_GET_FEATURES")?;
        ensure!(features & FEATURES == FEATURES, "it has the features {features:#x}, without {FEATURES:#x}");
        self.ioctl(request::SET_FEATURES, &mut { FEATURES }).context("VHOST_SET_FEATURES")?;
        // The guest's physical addresses are those of this process.
        let table = [&self.receive, &self.send].map(|ring| {
            let (start, len) = ring.region();
            Region { guest: start, len, user: start, flags: 0 }
        });
        let mut memory = Memory { regions: table.len() as u32, padding: 0, table };
        self.ioctl(request::SET_MEM_TABLE, &mut memory).context("VHOST_SET_MEM_TABLE")?;
        for (index, ring) in [(RECEIVE, &self.receive), (SEND, &self.send)] {
            let set = |request, value| self.ioctl(request, &mut State { index, value });
            set(request::SET_VRING_NUM, ENTRIES.into()).context("VHOST_SET_VRING_NUM")?;
            set(request::SET_VRING_BASE, 0).context("VHOST_SET_VRING_BASE")?;
            let [descriptors, available, used] = ring.parts();
            let mut addresses = Addresses { index, flags: 0, descriptors, used, available, log: 0 };
            self.ioctl(request::SET_VRING_ADDR, &mut addresses).context("VHOST_SET_VRING_ADDR")?;
            set(request::SET_VRING_KICK, number(ring.kick.as_fd())).context("VHOST_SET_VRING_KICK")?;
            set(request::SET_VRING_CALL, number(ring.call.as_fd())).context("VHOST_SET_VRING_CALL")?;
        }
        for index in [RECEIVE, SEND] {
            let mut backend = State { index, value: number(queue) };
            self.ioctl(request::SET_BACKEND, &mut backend).context("VHOST_NET_SET_BACKEND")?;
        }
        Ok(())
    }

    fn ioctl<T>(&self, request: u32, argument: &mut T) -> io::Result<()> {
        // SAFETY: the descriptor is open, and each request of this file is made with the structure whose size is part
        // of its number (or which it ignores). It outlives the call. The memory that the structures name belongs to
        // the rings. It consists of atomics, because the kernel writes there, and `drop` keeps it until the kernel has
        // stopped.
        let rc = unsafe {
            libc::ioctl(self.device.as_raw_fd(), request as libc::Ioctl, std::ptr::from_mut(argument))
        };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// The descriptor that is readable when frames may have arrived, until [`Vhost::receive`] returns `None`.
    #[must_use]
    pub fn arrivals(&self) -> BorrowedFd<'_> {
        self.receive.call.as_fd()
    }

    /// Takes one frame, with the header that a tap without vhost gives it; `None` if none is waiting. Like `read(2)`,
    /// it cuts off what does not fit into the buffer.
    ///
    /// # Errors
    /// Fails if the rings contradict virtio, or the kernel cannot be woken.
    pub fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let Some((slot, len)) = self.receive.take()? else { return Ok(None) };
        self.frame.clear();
        self.receive.read(slot, len, &mut self.frame);
        self.receive.offer(slot);
        let count =
            self.frame.get(SHARED_HEADER..HEADER).map(|count| u16::from_le_bytes([count[0], count[1]]));
        let count = count.filter(|count| (1..=ENTRIES).contains(count));
        let count = count.ok_or_else(|| io::Error::other("vhost-net gave a frame without a header"))?;
        for _ in 1..count {
            // The kernel shows all buffers of a frame at once.
            let next = self.receive.take()?;
            let (slot, len) = next.ok_or_else(|| io::Error::other("vhost-net gave a part of a frame"))?;
            self.receive.read(slot, len, &mut self.frame);
            self.receive.offer(slot);
        }
        self.receive.publish()?;
        self.frame.drain(SHARED_HEADER..HEADER);
        let len = self.frame.len().min(buffer.len());
        buffer[..len].copy_from_slice(&self.frame[..len]);
        Ok(Some(len))
    }

    /// Sends one frame, with the header of a tap without vhost. False if the ring has had no room for a second.
    ///
    /// The kernel's thread may still refuse it: its errors reach no guest.
    ///
    /// # Errors
    /// Fails if the frame has no header, is longer than the ring, or the kernel cannot be woken.
    pub fn send(&mut self, frame: &[u8]) -> io::Result<bool> {
        let (header, rest) = frame.split_at_checked(SHARED_HEADER).ok_or(io::ErrorKind::InvalidInput)?;
        self.frame.clear();
        self.frame.extend_from_slice(header);
        self.frame.resize(HEADER, 0);
        self.frame.extend_from_slice(rest);
        let count = self.frame.len().div_ceil(SLOT);
        if count > ENTRIES.into() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if !self.make_room(count)? {
            return Ok(false);
        }
        let slots = self.free.split_off(self.free.len() - count);
        for (at, part) in self.frame.chunks(SLOT).enumerate() {
            self.send.write(slots[at], part);
            let next = slots.get(at + 1);
            let flags = if next.is_some() { GOES_ON } else { 0 };
            self.send.describe(slots[at], part.len(), flags, next.copied().unwrap_or(0));
        }
        self.lengths[usize::from(slots[0])] = count as u16;
        self.send.offer(slots[0]);
        self.send.publish()?;
        Ok(true)
    }

    /// Waits until this many descriptors of the ring for sending are free. False if that takes longer than [`ROOM`].
    fn make_room(&mut self, count: usize) -> io::Result<bool> {
        let start = Instant::now();
        loop {
            while let Some((head, _)) = self.send.take()? {
                let mut slot = head;
                for _ in 0..self.lengths[usize::from(head)] {
                    self.free.push(slot);
                    slot = self.send.next_of(slot);
                }
            }
            if self.free.len() >= count {
                return Ok(true);
            }
            let Some(left) = ROOM.checked_sub(start.elapsed()) else { return Ok(false) };
            crate::pump::wait_for(
                &mut [crate::pump::readable(self.send.call.as_fd())],
                left.as_millis() as i32 + 1,
            );
        }
    }
}

impl Drop for Vhost {
    fn drop(&mut self) {
        // A child between fork and exec may have a copy of the device, so closing it does not stop the kernel's thread.
        // This does: it returns when the thread no longer uses the rings.
        for index in [RECEIVE, SEND] {
            let mut nothing = State { index, value: u32::MAX };
            if let Err(error) = self.ioctl(request::SET_BACKEND, &mut nothing) {
                eprintln!("cannot stop vhost-net, which keeps its memory: {error}");
                std::mem::forget(
                    [&mut self.receive, &mut self.send].map(|ring| std::mem::take(&mut ring.words)),
                );
                return;
            }
        }
    }
}

/// A descriptor as vhost wants it.
fn number(descriptor: BorrowedFd<'_>) -> u32 {
    descriptor.as_raw_fd().cast_unsigned()
}

/// A split virtqueue with its buffers, one for each descriptor. All of it is one block of memory:
///
/// ```text
/// descriptors: 16 bytes each │ available: flags, index, heads │ 4 bytes, used: flags, index, (head, length) │ buffers
/// ```
///
/// The four bytes in front put each element of the used ring into one word.
#[derive(Debug)]
struct Ring {
    /// The kernel reads and writes these words, too.
    words: Box<[AtomicU64]>,
    /// The first word of the descriptors: their alignment is 16.
    start: usize,
    kick: File,
    call: File,
    /// Heads that were offered.
    offered: u16,
    /// Elements of the used ring that were taken.
    taken: u16,
}

/// Words of the parts of a ring.
const DESCRIPTORS: usize = 2 * ENTRIES as usize;
const AVAILABLE: usize = 1 + (ENTRIES as usize).div_ceil(4);
const USED: usize = 2 + ENTRIES as usize;
/// Words of a buffer.
const SLOT_WORDS: usize = SLOT / size_of::<u64>();

impl Ring {
    fn new() -> Result<Self> {
        let words = 1 + DESCRIPTORS + AVAILABLE + USED + SLOT_WORDS * usize::from(ENTRIES);
        let words: Box<[AtomicU64]> = (0..words).map(|_| AtomicU64::new(0)).collect();
        let start = words.as_ptr().addr() % 16 / size_of::<u64>();
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(File::from);
        Ok(Self { words, start, kick: event()?, call: event()?, offered: 0, taken: 0 })
    }

    /// The address and the length of the memory.
    fn region(&self) -> (u64, u64) {
        (self.words.as_ptr().expose_provenance() as u64, size_of_val(&*self.words) as u64)
    }

    /// The addresses of descriptors, available ring and used ring.
    fn parts(&self) -> [u64; 3] {
        let word = |at: usize| self.region().0 + ((self.start + at) * size_of::<u64>()) as u64;
        [word(0), word(DESCRIPTORS), word(DESCRIPTORS + AVAILABLE) + 4]
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.words[self.start + at]
    }

    fn slot(&self, slot: u16) -> &[AtomicU64] {
        let first = self.start + DESCRIPTORS + AVAILABLE + USED + SLOT_WORDS * usize::from(slot);
        &self.words[first..first + SLOT_WORDS]
    }

    /// Writes the descriptor of a buffer.
    fn describe(&self, slot: u16, len: usize, flags: u64, next: u16) {
        let address = self.slot(slot).as_ptr().expose_provenance() as u64;
        self.word(2 * usize::from(slot)).store(address, Ordering::Relaxed);
        let second = len as u64 | flags << 32 | u64::from(next) << 48;
        self.word(2 * usize::from(slot) + 1).store(second, Ordering::Relaxed);
    }

    /// The descriptor in which a frame goes on.
    fn next_of(&self, slot: u16) -> u16 {
        (self.word(2 * usize::from(slot) + 1).load(Ordering::Relaxed) >> 48) as u16
    }

    fn write(&self, slot: u16, bytes: &[u8]) {
        for (word, part) in self.slot(slot).iter().zip(bytes.chunks(size_of::<u64>())) {
            let mut whole = [0; size_of::<u64>()];
            whole[..part.len()].copy_from_slice(part);
            word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
        }
    }

    fn read(&self, slot: u16, len: usize, to: &mut Vec<u8>) {
        let end = to.len() + len.min(SLOT);
        for word in self.slot(slot).iter().take(len.div_ceil(size_of::<u64>())) {
            to.extend_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        to.truncate(end);
    }

    /// Puts a head on the available ring, unseen until [`Ring::publish`].
    fn offer(&mut self, head: u16) {
        let byte = 4 + 2 * usize::from(self.offered % ENTRIES);
        let word = self.word(DESCRIPTORS + byte / 8);
        let shift = byte % 8 * 8;
        let others = word.load(Ordering::Relaxed) & !(0xffff << shift);
        word.store(others | u64::from(head) << shift, Ordering::Relaxed);
        self.offered = self.offered.wrapping_add(1);
    }

    /// Shows the kernel what was offered, and wakes it if it wants to be woken.
    fn publish(&mut self) -> io::Result<()> {
        let word = self.word(DESCRIPTORS);
        let others = word.load(Ordering::Relaxed) & !(0xffff << 16);
        word.store(others | u64::from(self.offered) << 16, Ordering::Release);
        // Otherwise the kernel could go to sleep between its look at the index and this look at its flag.
        fence(Ordering::SeqCst);
        if self.used() >> 32 & NO_NOTIFY == 0 {
            self.kick.write_all(&1_u64.to_ne_bytes())?;
        }
        Ok(())
    }

    /// The word whose upper half has flags and index of the used ring.
    fn used(&self) -> u64 {
        self.word(DESCRIPTORS + AVAILABLE).load(Ordering::Acquire)
    }

    /// Takes the next element of the used ring: a head, and how many bytes the kernel wrote.
    fn take(&mut self) -> io::Result<Option<(u16, usize)>> {
        let is_empty = |ring: &Self| (ring.used() >> 48) as u16 == ring.taken;
        if is_empty(self) {
            // The kernel writes first and signals then: what this does not see is signalled again.
            let mut count = [0; size_of::<u64>()];
            match self.call.read(&mut count) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            if is_empty(self) {
                return Ok(None);
            }
        }
        let at = DESCRIPTORS + AVAILABLE + 1 + usize::from(self.taken % ENTRIES);
        let element = self.word(at).load(Ordering::Relaxed);
        self.taken = self.taken.wrapping_add(1);
        let head = element as u32;
        if head >= ENTRIES.into() {
            return Err(io::Error::other(format!("vhost-net returned the descriptor {head}")));
        }
        Ok(Some((head as u16, (element >> 32) as usize)))
    }
}
