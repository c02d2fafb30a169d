//! Taps: the devices a hypervisor gives its guests, with the file descriptors that QEMU or vhost would hold.
//!
//! Writing to a descriptor sends a frame as the guest; reading receives a frame for the guest (Linux:
//! Documentation/networking/tuntap.rst). After [`Tap::attach_vhost`] frames go through the rings of vhost-net instead.
//! The kernel deletes a tap when its last descriptor closes.
#![expect(unsafe_code, reason = "taps are configured by ioctl, which has no safe form in std")]

use crate::netns::Namespace;
use crate::vhost::{self, Vhost};
use anyhow::{Context as _, Result, ensure};
use metadata_common::mac::Mac;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of `struct virtio_net_hdr`, the header of every frame of a tap with [`Shape::vnet_hdr`].
pub const VNET_HDR_LEN: usize = 10;
/// Longest interface name (IFNAMSIZ less the terminator).
pub const NAME_MAX: usize = libc::IFNAMSIZ - 1;

/// How long the name of a dropped tap may be in use: another test's thread that is between fork and exec holds copies of
/// its descriptors.
const LINGER: Duration = Duration::from_secs(10);

/// `_IOW('T', 218, unsigned int)` (Linux: include/uapi/linux/if_tun.h): sets the index of the interface to create.
const TUNSETIFINDEX: libc::Ioctl = 0x4004_54da;
/// `_IOW('T', 212, int)`: sets the limit of bytes that wait for the stack.
const TUNSETSNDBUF: libc::Ioctl = 0x4004_54d4;
/// `_IOW('T', 216, int)`: sets the length of the virtio header.
const TUNSETVNETHDRSZ: libc::Ioctl = 0x4004_54d8;
/// `_IOW('T', 217, int)`: attaches or detaches a queue.
const TUNSETQUEUE: libc::Ioctl = 0x4004_54d9;
/// Flags of [`TUNSETQUEUE`].
const IFF_ATTACH_QUEUE: libc::c_short = 0x0200;
const IFF_DETACH_QUEUE: libc::c_short = 0x0400;

/// Creation options of a tap.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of queues, with one descriptor each; more than 1 sets `IFF_MULTI_QUEUE`.
    pub queues: usize,
    /// Frames have a virtio header and may have partial checksums and 64 kB segments, as for a guest whose virtio NIC
    /// uses offloads. Without it every frame is complete and no longer than the MTU.
    pub vnet_hdr: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Self { queues: 1, vnet_hdr: false }
    }
}

impl Shape {
    /// One queue with offloads, as libvirt and KubeVirt create taps.
    #[must_use]
    pub const fn virtio() -> Self {
        Self { queues: 1, vnet_hdr: true }
    }
}

/// How a guest's frames travel between its NIC and its tap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// `read(2)` and `write(2)`, one call for each frame, as a hypervisor without vhost does.
    #[default]
    Calls,
    /// The rings of vhost-net, as in production. It needs [`Shape::vnet_hdr`].
    VhostNet,
}

impl Backend {
    /// Both ways.
    pub const ALL: [Self; 2] = [Self::Calls, Self::VhostNet];

    /// The plainest tap that it takes.
    #[must_use]
    pub fn plain(self) -> Shape {
        if self.takes(Shape::default()) { Shape::default() } else { Shape::virtio() }
    }

    /// True if it takes taps of this shape.
    #[must_use]
    pub fn takes(self, shape: Shape) -> bool {
        self == Self::Calls || shape.vnet_hdr
    }

    /// True if the calling test can use it; see [`privileged::or_skip`](crate::privileged::or_skip) and
    /// [`vhost::or_skip`].
    #[must_use]
    #[track_caller]
    pub fn or_skip(self) -> bool {
        match self {
            Self::Calls => crate::privileged::or_skip(),
            Self::VhostNet => vhost::or_skip(),
        }
    }
}

/// The rings of a queue behind vhost-net.
#[derive(Debug)]
struct Rings {
    /// Readable when frames wait for the guest.
    arrivals: OwnedFd,
    vhost: Mutex<Vhost>,
}

/// A tap and its non-blocking descriptors.
#[derive(Debug)]
pub struct Tap {
    name: String,
    shape: Shape,
    /// The rings of each queue, once frames go through vhost-net.
    vhost: OnceLock<Vec<Rings>>,
    queues: Vec<File>,
}

impl Tap {
    /// Creates a tap inside `ns`, down, with a MAC chosen by the kernel.
    ///
    /// # Errors
    /// Fails if the name is too long or stays in use for 10 s, or if the kernel refuses the shape.
    pub fn create(ns: &Namespace, name: &str, shape: Shape) -> Result<Self> {
        ensure!(
            (1..=NAME_MAX).contains(&name.len()),
            "a tap's name has 1 to {NAME_MAX} bytes, `{name}` has {}",
            name.len()
        );
        ensure!(shape.queues >= 1, "a tap has at least one queue");
        let open = || (0..shape.queues).map(|_| open_queue(name, shape)).collect::<io::Result<Vec<File>>>();
        let end = Instant::now() + LINGER;
        let queues = loop {
            match ns.run_in(open) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < end => {
                    thread::sleep(Duration::from_millis(10));
                }
                queues => {
                    break queues.with_context(|| format!("cannot make tap {name} in {}", ns.name()))?;
                }
            }
        };
        Ok(Self { name: name.to_owned(), shape, vhost: OnceLock::new(), queues })
    }

    /// Creates a tap with this interface index. The index of a deleted interface can be used again.
    ///
    /// # Errors
    /// Like [`Tap::create`]; also fails if the index is taken.
    pub fn create_at(ns: &Namespace, name: &str, shape: Shape, ifindex: u32) -> Result<Self> {
        ensure!(shape.queues == 1, "a tap with a given index has one queue");
        let queue = ns
            .run_in(|| open_queue_at(name, shape, Some(ifindex)))
            .with_context(|| format!("cannot make tap {name} as device {ifindex} in {}", ns.name()))?;
        Ok(Self { name: name.to_owned(), shape, vhost: OnceLock::new(), queues: vec![queue] })
    }

    /// Adds a queue to a tap that was created with several queues.
    ///
    /// # Errors
    /// Fails if there is no such tap, or it takes no more queues.
    pub fn another_queue(&self, ns: &Namespace) -> Result<Self> {
        let queue = ns
            .run_in(|| open_queue(&self.name, self.shape))
            .with_context(|| format!("cannot give tap {} another queue", self.name))?;
        let shape = Shape { queues: 1, ..self.shape };
        Ok(Self { name: self.name.clone(), shape, vhost: OnceLock::new(), queues: vec![queue] })
    }

    /// Gives every queue to vhost-net: from now on frames go through its rings. Queues that are added later do not.
    ///
    /// # Errors
    /// Fails if the tap has no virtio headers or already has rings, or there is no vhost-net.
    pub fn attach_vhost(&self) -> Result<()> {
        ensure!(
            self.shape.vnet_hdr,
            "vhost-net needs a tap with virtio headers; make {} with them",
            self.name
        );
        ensure!(self.vhost.get().is_none(), "{} is already attached to vhost-net", self.name);
        // Without a limit of its socket the kernel passes frames on in batches (drivers/vhost/net.c, `sock_can_batch`).
        for (request, value) in
            [(TUNSETVNETHDRSZ, vhost::HEADER as libc::c_int), (TUNSETSNDBUF, libc::c_int::MAX)]
        {
            for queue in &self.queues {
                // SAFETY: the descriptor is open and the number outlives the call, which reads one int.
                let rc = unsafe { libc::ioctl(queue.as_raw_fd(), request, &raw const value) };
                check(rc).with_context(|| format!("cannot prepare {} for vhost-net", self.name))?;
            }
        }
        let attach = |queue: &File| {
            let vhost = Vhost::attach(queue.as_fd())?;
            Ok(Rings { arrivals: vhost.arrivals().try_clone_to_owned()?, vhost: Mutex::new(vhost) })
        };
        let rings = self.queues.iter().map(attach).collect::<Result<Vec<_>>>();
        let rings = rings.with_context(|| format!("cannot attach {} to vhost-net", self.name))?;
        self.vhost.set(rings).map_err(|_| anyhow::anyhow!("{} was attached to vhost-net twice", self.name))
    }

    /// Detaches a queue, as QEMU does with those that its guest does not use: the kernel then sends nothing to it.
    ///
    /// # Errors
    /// Fails if the tap was not created with several queues, or the queue is detached already.
    pub fn detach_queue(&self, queue: usize) -> Result<()> {
        self.set_queue(queue, IFF_DETACH_QUEUE)
    }

    /// Attaches a queue again that was detached, as QEMU does when its guest begins to use it.
    ///
    /// # Errors
    /// Fails if the queue is not detached.
    pub fn attach_queue(&self, queue: usize) -> Result<()> {
        self.set_queue(queue, IFF_ATTACH_QUEUE)
    }

    fn set_queue(&self, queue: usize, flag: libc::c_short) -> Result<()> {
        let mut request = request(&self.name);
        request.ifr_ifru.ifru_flags = flag;
        // SAFETY: the descriptor is open and the request outlives the call, which reads one ifreq.
        let rc = unsafe { libc::ioctl(self.queues[queue].as_raw_fd(), TUNSETQUEUE, &raw const request) };
        check(rc).with_context(|| format!("cannot attach or detach queue {queue} of {}", self.name))
    }

    /// The interface name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The tap's creation options.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Sets the device's own MAC; on the guest's side this is the guest's MAC.
    ///
    /// # Errors
    /// Fails if the kernel refuses it, e.g. a group address.
    pub fn set_mac(&self, mac: Mac) -> Result<()> {
        let mut request = request(&self.name);
        // SAFETY: sockaddr is plain data, and all zeros are a valid value.
        let mut address: libc::sockaddr = unsafe { std::mem::zeroed() };
        address.sa_family = libc::ARPHRD_ETHER;
        for (to, from) in address.sa_data.iter_mut().zip(mac.0) {
            *to = libc::c_char::from_ne_bytes([from]);
        }
        request.ifr_ifru.ifru_hwaddr = address;
        // SAFETY: the descriptor is open and the request outlives the call, which reads one ifreq.
        let rc = unsafe {
            libc::ioctl(self.queues[0].as_raw_fd(), libc::SIOCSIFHWADDR as libc::Ioctl, &raw const request)
        };
        check(rc).with_context(|| format!("cannot give {} the address {mac}", self.name))
    }

    /// The rings of a queue, if frames go through vhost-net.
    fn rings(&self, queue: usize) -> Option<MutexGuard<'_, Vhost>> {
        let rings = self.vhost.get()?;
        Some(rings[queue].vhost.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads one frame that the kernel sent to the tap, with its virtio header; `None` if none is waiting.
    ///
    /// # Errors
    /// Like `read(2)`; `EBADFD` after the tap was deleted. Behind vhost-net only if the rings are broken.
    pub fn receive(&self, queue: usize, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        if let Some(mut rings) = self.rings(queue) {
            return rings.receive(buffer);
        }
        match (&self.queues[queue]).read(buffer) {
            Ok(len) => Ok(Some(len)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends one frame, with its virtio header, as the guest. False if the kernel has no room for it.
    ///
    /// # Errors
    /// Like `write(2)`; `EBADFD` after the tap was deleted, `EIO` while it is down. vhost-net tells its guest of no
    /// error.
    pub fn send(&self, queue: usize, frame: &[u8]) -> io::Result<bool> {
        if let Some(mut rings) = self.rings(queue) {
            return rings.send(frame);
        }
        match (&self.queues[queue]).write(frame) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// For each queue the descriptor that is readable when frames wait for the guest: the queue itself, or what
    /// vhost-net signals.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        (0..self.queues.len()).map(|queue| self.descriptor(queue))
    }

    fn descriptor(&self, queue: usize) -> BorrowedFd<'_> {
        match self.vhost.get() {
            Some(rings) => rings[queue].arrivals.as_fd(),
            None => self.queues[queue].as_fd(),
        }
    }
}

/// The descriptor of the first queue, like [`Tap::descriptors`].
impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor(0)
    }
}

/// `struct ethtool_value` (linux/ethtool.h).
#[repr(C)]
struct Setting {
    command: u32,
    value: u32,
}

/// Switches generic receive offload of a device on or off, like `ethtool -K IFNAME gro on`.
///
/// # Errors
/// Fails if there is no such device, or it lacks the setting.
pub fn set_gro(ns: &Namespace, ifname: &str, on: bool) -> Result<()> {
    /// From linux/ethtool.h and linux/sockios.h.
    const ETHTOOL_SGRO: u32 = 0x2c;
    const SIOCETHTOOL: libc::Ioctl = 0x8946;
    let set = || -> io::Result<()> {
        let socket = std::os::unix::net::UnixDatagram::unbound()?;
        let mut setting = Setting { command: ETHTOOL_SGRO, value: on.into() };
        let mut request = request(ifname);
        request.ifr_ifru.ifru_data = (&raw mut setting).cast();
        // SAFETY: the descriptor is open; the request and the setting it points to outlive the call, which reads both.
        check(unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) })
    };
    ns.run_in(set).with_context(|| format!("cannot turn GRO of {ifname} {}", if on { "on" } else { "off" }))
}

fn open_queue(name: &str, shape: Shape) -> io::Result<File> {
    open_queue_at(name, shape, None)
}

fn open_queue_at(name: &str, shape: Shape, ifindex: Option<u32>) -> io::Result<File> {
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    if let Some(ifindex) = ifindex {
        // SAFETY: the descriptor is open and the number outlives the call, which reads one u32.
        let rc = unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFINDEX, &raw const ifindex) };
        check(rc)?;
    }
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI;
    if shape.queues > 1 {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    if shape.vnet_hdr {
        flags |= libc::IFF_VNET_HDR;
    }
    let mut request = request(name);
    // The flag word is 16 bits wide; every flag above fits.
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: the descriptor is open and the request outlives the call, which reads and writes one ifreq.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    check(rc)?;
    if shape.vnet_hdr {
        let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
        // SAFETY: the descriptor is open; TUNSETOFFLOAD takes its argument by value.
        let rc = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads)) };
        check(rc)?;
    }
    Ok(file)
}

fn request(name: &str) -> libc::ifreq {
    // SAFETY: ifreq is plain data, and all zeros are a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().take(NAME_MAX).zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request
}

fn check(rc: libc::c_int) -> io::Result<()> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::{Shape, Tap};
    use crate::eventually;
    use crate::netns::Namespace;
    use crate::privileged;
    use metadata_common::mac::Mac;
    use std::thread;
    use std::time::Duration;

    #[privileged::test]
    fn a_tap_lives_in_its_namespace_with_the_mac_it_was_given() {
        let ns = Namespace::new("tap").expect("a namespace");
        for shape in [Shape::default(), Shape::virtio(), Shape { queues: 3, vnet_hdr: true }] {
            let tap = Tap::create(&ns, "tap0", shape).expect("a tap");
            tap.set_mac(Mac([0x52, 0x54, 0, 1, 2, 3])).expect("its address");
            let shown = ns.ip("link show tap0").expect("the link");
            assert!(shown.contains("52:54:00:01:02:03"), "{shape:?}: {shown}");
            assert_eq!(tap.descriptors().count(), shape.queues);
            drop(tap);
            // Another test's thread may be between fork and exec, and hold copies of the descriptors.
            eventually(Duration::from_secs(5), || {
                anyhow::ensure!(
                    ns.ip("link show tap0").is_err(),
                    "{shape:?}: the tap outlived its descriptors"
                );
                Ok(())
            })
            .expect("no tap");
        }
    }

    #[privileged::test]
    fn a_name_can_be_used_again_while_a_process_is_being_started() {
        let ns = Namespace::new("tap").expect("a namespace");
        let tap = Tap::create(&ns, "tap0", Shape::default()).expect("a tap");
        let held = tap.queues[0].try_clone().expect("a copy of the descriptor");
        drop(tap);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(200));
                drop(held);
            });
            Tap::create(&ns, "tap0", Shape::default()).expect("another tap");
        });
    }

    #[privileged::test]
    fn a_name_too_long_for_the_kernel_is_refused() {
        let ns = Namespace::new("tap").expect("a namespace");
        let error = Tap::create(&ns, "sixteen-bytes-xx", Shape::default()).expect_err("a refusal");
        assert!(error.to_string().contains("15 bytes"), "{error}");
    }
}
