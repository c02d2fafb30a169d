//! Runs the eBPF programs on single frames by `BPF_PROG_TEST_RUN`.
//!
//! The programs are loaded in a new network namespace. Its loopback replaces every device. A test run chooses a frame's
//! target device but does not send the frame.
#![expect(unsafe_code, reason = "unshare and AF_XDP sockets have no safe form in std")]

pub use crate::kernel::KEY;

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::time::Duration;

use crate::bpffs::Bpffs;
use anyhow::{Context as _, Result, ensure};
use aya::maps::xdp::{DevMap, DevMapHash, XskMap};
use aya::maps::{Array, HashMap, MapData, PerCpuArray, ProgramArray, RingBuf};
use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use metadata_common::cookie::Flow;
use metadata_common::mac::Mac;
use metadata_common::maps::{
    ARP_ONLY, AllSent, CLAIMED, Guest, IN_FRONT, Identity, IdentityKey, LONG_RESPONSE_BYTES, MAX_HUBS, Port,
    PortKey, SERVED, ServedDate, Slot, name, program,
};
use metadata_common::trace::{PASSING_TOO, Scratch, Trace, TraceEvent};
use metadata_common::verdict::Verdict;

/// The variable that names a directory of objects to test instead of the committed ones.
pub const OBJECTS: &str = "XDP_IMDS_OBJECTS";
/// The committed objects.
const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../metadata-ebpf/prebuilt");

/// `XDP_DROP`, as the programs return it (`enum xdp_action` in linux/bpf.h).
pub const XDP_DROP: u32 = 1;
/// `XDP_PASS`.
pub const XDP_PASS: u32 = 2;
/// `XDP_TX`.
pub const XDP_TX: u32 = 3;
/// `XDP_REDIRECT`.
pub const XDP_REDIRECT: u32 = 4;

/// `TC_ACT_UNSPEC`, as the classifier returns it for a frame that passes (linux/pkt_cls.h).
pub const TC_ACT_UNSPEC: u32 = u32::MAX;
/// `TC_ACT_SHOT`.
pub const TC_ACT_SHOT: u32 = 2;
/// `TC_ACT_REDIRECT`.
pub const TC_ACT_REDIRECT: u32 = 7;

/// The ring buffer to which aya-log writes.
const LOG: &str = "AYA_LOGS";

/// Interface index of the loopback in every namespace. It is the default ingress interface of a test run.
pub const LOOPBACK: u32 = 1;

/// Size of the output buffer for a frame, in bytes.
const OUT_LEN: usize = 4_096;

/// Runs a test on a thread in an empty network namespace. The namespace ends with the thread.
///
/// # Panics
/// When the body panics, or the namespace cannot be created.
pub fn in_empty_namespace<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    let alone = || {
        // SAFETY: unshare changes only the calling thread's namespace, and this thread ends with the body.
        let rc = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(rc, 0, "unshare(CLONE_NEWNET): {}", std::io::Error::last_os_error());
        body()
    };
    std::thread::scope(|scope| match scope.spawn(alone).join() {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// The content of an object's file.
pub(crate) fn object(name: &str) -> Result<Vec<u8>> {
    let directory = std::env::var(OBJECTS).unwrap_or_else(|_| DIRECTORY.into());
    let path = format!("{directory}/{name}.bpf.o");
    std::fs::read(&path).with_context(|| format!("no object at {path}"))
}

/// The result of a run.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The program's return value: an `xdp_action`, or a `TC_ACT` of a classifier.
    pub action: u32,
    /// The frame after the run.
    pub frame: Vec<u8>,
    /// The increase of every counter that changed.
    pub counted: Vec<(Verdict, u64)>,
}

/// A directory for the pins of maps that stubs share with the programs behind them.
pub(crate) struct SharedMaps(Bpffs);

impl SharedMaps {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(Bpffs::mount()?))
    }

    /// A loader for the programs or the stubs.
    pub(crate) fn loader(&self) -> EbpfLoader<'static> {
        let mut loader = EbpfLoader::new();
        for map in name::OF_STUBS {
            loader.map_pin_path(map, self.0.path().join(name::pin(map)));
        }
        loader
    }
}

/// A table of ordinary bytes without any: programs inspect every frame.
const NOTHING: [u8; 256] = [0; 256];

/// The programs that see a frame as a socket buffer.
const CLASSIFIERS: [&str; 4] = [program::PORT_TCX, program::REQUEST_TCX, program::HUB_TCX, program::RING];

/// The programs of the objects, loaded for one network namespace.
pub struct Programs {
    ebpf: Ebpf,
    stub: Option<Ebpf>,
}

impl Programs {
    /// Loads all programs with `NETNS` set and empty maps.
    ///
    /// # Errors
    /// When the object cannot be read, or the kernel refuses it. The error contains the verifier's log.
    pub fn load(netns: u32) -> Result<Self> {
        Self::load_by(EbpfLoader::new().override_global(name::NETNS, &netns, true))
    }

    fn load_by(loader: &mut EbpfLoader<'_>) -> Result<Self> {
        let mut ebpf = loader
            .override_global(name::COOKIE_KEY, &KEY.0, true)
            .load(&object("xdp-imds")?)
            .context("the object cannot be loaded")?;
        for program in [program::PORT, program::REQUEST, program::SOCKET, program::HUB] {
            xdp(&mut ebpf, program)?.load().with_context(|| format!("program `{program}`"))?;
        }
        for program in CLASSIFIERS {
            classifier(&mut ebpf, program)?.load().with_context(|| format!("program `{program}`"))?;
        }
        Ok(Self { ebpf, stub: None })
    }

    /// Loads the programs and the stubs. `port` and `port_tcx` then run only if a stub calls them.
    ///
    /// # Errors
    /// As for [`Programs::load`].
    pub fn load_behind_stub(netns: u32) -> Result<Self> {
        let shared = SharedMaps::new()?;
        let mut programs = Self::load_by(shared.loader().override_global(name::NETNS, &IN_FRONT, true))?;
        let mut stub = shared
            .loader()
            .override_global(name::NETNS, &netns, true)
            .load(&object("port-stub")?)
            .context("the stub cannot be loaded")?;
        xdp(&mut stub, program::PORT_STUB)?.load().context("the stub")?;
        let port = xdp(&mut programs.ebpf, program::PORT)?.fd()?;
        let map = stub.map_mut(name::PORT_PROGRAMS).context(name::PORT_PROGRAMS)?;
        ProgramArray::try_from(map)?.set(0, port, 0)?;
        classifier(&mut stub, program::PORT_TCX_STUB)?.load().context("the classifier's stub")?;
        let port = classifier(&mut programs.ebpf, program::PORT_TCX)?.fd()?;
        let map = stub.map_mut(name::PORT_CLASSIFIERS).context(name::PORT_CLASSIFIERS)?;
        ProgramArray::try_from(map)?.set(0, port, 0)?;
        let ring = classifier(&mut programs.ebpf, program::RING)?.fd()?.try_clone()?;
        let map = programs.ebpf.map_mut(name::RINGS).context(name::RINGS)?;
        let mut rings = ProgramArray::try_from(map)?;
        (0..MAX_HUBS).try_for_each(|hub| rings.set(hub, &ring, 0))?;
        programs.stub = Some(stub);
        Ok(programs)
    }

    /// Removes the programs that the stubs call, as happens when an agent without pins ends.
    ///
    /// # Errors
    /// When there is no stub.
    pub fn take_from_behind(&mut self) -> Result<()> {
        let stub = self.stub.as_mut().context("a stub")?;
        for name in [name::PORT_PROGRAMS, name::PORT_CLASSIFIERS] {
            let map = stub.map_mut(name).context(name)?;
            ProgramArray::try_from(map)?.clear_index(&0)?;
        }
        Ok(())
    }

    /// Runs one program on one frame from the loopback.
    ///
    /// # Errors
    /// When the kernel refuses the run, for example of a frame of less than 14 bytes.
    pub fn run(&mut self, program: &str, frame: &[u8]) -> Result<Outcome> {
        let before = self.counters()?;
        let (action, frame) = self.run_uncounted(program, frame)?;
        let after = self.counters()?;
        let moved = Verdict::ALL.iter().zip(before.iter().zip(after));
        let counted =
            moved.filter(|(_, (b, a))| *b != a).map(|(verdict, (b, a))| (*verdict, a - b)).collect();
        Ok(Outcome { action, frame, counted })
    }

    /// Like [`Programs::run`], but without reading the counters, which takes most of the time.
    ///
    /// # Errors
    /// As for [`Programs::run`].
    pub fn run_uncounted(&mut self, program: &str, frame: &[u8]) -> Result<(u32, Vec<u8>)> {
        let mut out = vec![0; OUT_LEN];
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.data_out = Some(&mut out);
        let result = if let (program::PORT_STUB, Some(stub)) = (program, &mut self.stub) {
            xdp(stub, program)?.test_run(options)
        } else if let (program::PORT_TCX_STUB, Some(stub)) = (program, &mut self.stub) {
            classifier(stub, program)?.test_run(options)
        } else if CLASSIFIERS.contains(&program) {
            classifier(&mut self.ebpf, program)?.test_run(options)
        } else {
            xdp(&mut self.ebpf, program)?.test_run(options)
        };
        let result = result.context("BPF_PROG_TEST_RUN")?;
        out.truncate(usize::try_from(result.data_size_out)?);
        Ok((result.return_value, out))
    }

    /// All counters by verdict number, summed over the CPUs.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn counters(&self) -> Result<Vec<u64>> {
        let map = self.ebpf.map(name::COUNTERS).context(name::COUNTERS)?;
        let map = PerCpuArray::<&MapData, u64>::try_from(map)?;
        ensure!(map.len() == Verdict::COUNT, "{} counters for {} verdicts", map.len(), Verdict::COUNT);
        let sum = |index| Ok(map.get(&index, 0)?.iter().sum());
        (0..Verdict::COUNT).map(sum).collect()
    }

    /// Reads the programs' new log lines. Returns their number.
    ///
    /// # Errors
    /// When the object has no log.
    pub fn take_log(&mut self) -> Result<usize> {
        let mut log = RingBuf::try_from(self.ebpf.map_mut(LOG).context(LOG)?)?;
        Ok(std::iter::from_fn(|| log.next().map(drop)).count())
    }

    /// Serves an address.
    ///
    /// # Errors
    /// When the kernel refuses the entry.
    pub fn serve(&mut self, address: IpAddr) -> Result<()> {
        match address {
            IpAddr::V4(v4) => {
                self.hash::<[u8; 4], u32>(name::SERVED_V4)?.insert(v4.octets(), SERVED, 0)?;
                self.may_be_served(v4.octets()[3])?;
            }
            IpAddr::V6(v6) => {
                self.hash::<[u8; 16], u32>(name::SERVED_V6)?.insert(v6.octets(), SERVED, 0)?;
                self.may_be_served(v6.octets()[15])?;
            }
        }
        Ok(())
    }

    /// Answers ARP for an address, and nothing else.
    ///
    /// # Errors
    /// As for [`Programs::serve`].
    pub fn answer_arp(&mut self, address: Ipv4Addr) -> Result<()> {
        self.hash::<[u8; 4], u32>(name::SERVED_V4)?.insert(address.octets(), ARP_ONLY, 0)?;
        self.may_be_served(address.octets()[3])
    }

    fn may_be_served(&mut self, last: u8) -> Result<()> {
        let mut table = self.ordinary()?;
        let mut bytes = match table.get(&0, 0)? {
            NOTHING => [1; 256],
            bytes => bytes,
        };
        bytes[usize::from(last)] = 0;
        Ok(table.set(0, bytes, 0)?)
    }

    fn ordinary(&mut self) -> Result<Array<&mut MapData, [u8; 256]>> {
        let map = self.ebpf.map_mut(name::ORDINARY).context(name::ORDINARY)?;
        Ok(Array::try_from(map)?)
    }

    /// Registers a port.
    ///
    /// # Errors
    /// As for [`Programs::serve`].
    pub fn own(&mut self, key: PortKey, port: Port) -> Result<()> {
        Ok(self.hash::<[u8; 8], [u8; 72]>(name::PORTS)?.insert(key.to_bytes(), port.to_bytes(), 0)?)
    }

    /// Registers a MAC on a port, as the guest of its slot.
    ///
    /// # Errors
    /// As for [`Programs::serve`].
    pub fn register(&mut self, port: PortKey, mac: Mac, identity: Identity) -> Result<()> {
        let key = IdentityKey { port, mac: mac.0, reserved: [0; 2] };
        self.place_guest(identity.slot, Guest { mac: mac.0, live: 1 })?;
        Ok(self.hash::<[u8; 16], [u8; 16]>(name::IDENTITIES)?.insert(
            key.to_bytes(),
            identity.to_bytes(),
            0,
        )?)
    }

    /// Claims a connection, like a departing agent.
    ///
    /// # Errors
    /// As for [`Programs::serve`].
    pub fn claim(&mut self, flow: Flow) -> Result<()> {
        Ok(self.hash::<u64, u32>(name::DRAINING)?.insert(flow.number(), CLAIMED, 0)?)
    }

    /// Starts a trace.
    ///
    /// # Errors
    /// As for [`Programs::serve`].
    pub fn watch(&mut self, trace: Trace) -> Result<()> {
        if trace.flags & PASSING_TOO != 0 {
            self.ordinary()?.set(0, NOTHING, 0)?;
        }
        let map = self.ebpf.map_mut(name::TRACE).context(name::TRACE)?;
        Ok(Array::<_, [u32; 5]>::try_from(map)?.set(0, trace.to_words(), 0)?)
    }

    /// Reads the new events of the trace.
    ///
    /// # Errors
    /// When an event has a wrong length.
    pub fn take_events(&mut self) -> Result<Vec<TraceEvent>> {
        let mut ring = RingBuf::try_from(self.ebpf.map_mut(name::EVENTS).context(name::EVENTS)?)?;
        let mut events = Vec::new();
        while let Some(item) = ring.next() {
            events.push(TraceEvent::from_bytes(&item).context("an event of a wrong length")?);
        }
        Ok(events)
    }

    /// Number of events lost because the ring was full.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn lost_events(&self) -> Result<u64> {
        const WORDS: usize = size_of::<Scratch>() / 8;
        let map = self.ebpf.map(name::TRACED).context(name::TRACED)?;
        let map = PerCpuArray::<&MapData, [u64; WORDS]>::try_from(map)?;
        Ok(map.get(&0, 0)?.iter().map(|[lost, ..]| lost).sum())
    }

    /// Sets the loopback as the device of a hub.
    ///
    /// # Errors
    /// As for [`Programs::serve`].
    pub fn place_hub(&mut self, hub: u32) -> Result<()> {
        let map = self.ebpf.map_mut(name::HUB_DEVICES).context(name::HUB_DEVICES)?;
        Array::<_, u32>::try_from(map)?.set(hub, LOOPBACK, 0)?;
        let map = self.ebpf.map_mut(name::HUBS).context(name::HUBS)?;
        Ok(DevMap::try_from(map)?.set(hub, LOOPBACK, None, 0)?)
    }

    /// Sets the guest of a slot.
    ///
    /// # Errors
    /// As for [`Programs::serve`].
    pub fn place_guest(&mut self, slot: Slot, guest: Guest) -> Result<()> {
        let map = self.ebpf.map_mut(name::GUESTS).context(name::GUESTS)?;
        Ok(Array::<_, u64>::try_from(map)?.set(slot, u64::from_ne_bytes(guest.to_bytes()), 0)?)
    }

    /// Publishes a long response, and the value of `Date`.
    ///
    /// # Errors
    /// As for [`Programs::serve`].
    pub fn place_response(
        &mut self,
        number: u64,
        response: [u8; LONG_RESPONSE_BYTES],
        date: ServedDate,
    ) -> Result<()> {
        self.hash::<u64, [u8; LONG_RESPONSE_BYTES]>(name::LONG_BODIES)?.insert(number, response, 0)?;
        Ok(self.hash::<u32, [u64; 5]>(name::DATE)?.insert(0, date.to_words(), 0)?)
    }

    /// Sets the loopback as the device of a slot.
    ///
    /// # Errors
    /// As for [`Programs::serve`].
    pub fn place_guest_device(&mut self, slot: Slot) -> Result<()> {
        let map = self.ebpf.map_mut(name::GUEST_DEVICES).context(name::GUEST_DEVICES)?;
        Ok(DevMapHash::try_from(map)?.insert(slot, LOOPBACK, None, 0)?)
    }

    /// Sets a slot's entry in the table of devices that the hub's classifier delivers to.
    ///
    /// # Errors
    /// As for [`Programs::serve`].
    pub fn place_home_device(&mut self, slot: Slot, entry: u32) -> Result<()> {
        let map = self.ebpf.map_mut(name::HOME_DEVICES).context(name::HOME_DEVICES)?;
        Ok(Array::<_, u32>::try_from(map)?.set(slot, entry, 0)?)
    }

    /// Enters an unbound AF_XDP socket for a queue. The kernel removes the entry when the socket closes.
    ///
    /// # Errors
    /// When the kernel has no AF_XDP, or as for [`Programs::serve`].
    pub fn place_socket(&mut self, queue: u32) -> Result<OwnedFd> {
        // SAFETY: socket takes no pointers.
        let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        ensure!(fd >= 0, "socket(AF_XDP): {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor was just opened and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let map = self.ebpf.map_mut(name::SOCKETS).context(name::SOCKETS)?;
        XskMap::try_from(map)?.set(queue, socket.as_raw_fd(), 0)?;
        Ok(socket)
    }

    /// Posts a connection, like user space.
    ///
    /// # Errors
    /// As for [`Programs::serve`].
    pub fn post(&mut self, flow: Flow, said: AllSent) -> Result<()> {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let words = [
            said.flow,
            pair(said.sent, said.received),
            pair(u32::from(said.finished) | u32::from(said.opened) << 16, said.held),
            pair(said.acknowledged, said.closed),
        ];
        let map = self.ebpf.map_mut(name::ALL_SENT).context(name::ALL_SENT)?;
        Ok(Array::<_, [u64; 4]>::try_from(map)?.set(flow.index(), words, 0)?)
    }

    /// The entry of a connection.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn posted(&self, flow: Flow) -> Result<AllSent> {
        let map = self.ebpf.map(name::ALL_SENT).context(name::ALL_SENT)?;
        let [flow, numbers, state, heard] = Array::<_, [u64; 4]>::try_from(map)?.get(&flow.index(), 0)?;
        let halves = |word: u64| (word as u32, (word >> 32) as u32);
        let ((sent, received), (words, held)) = (halves(numbers), halves(state));
        let (finished, opened) = (words as u16, (words >> 16) as u16);
        let (acknowledged, closed) = halves(heard);
        Ok(AllSent { flow, sent, received, finished, opened, held, acknowledged, closed })
    }

    /// Number of instructions that the verifier processed on all paths of a program. Its limit is one million.
    ///
    /// # Errors
    /// When the kernel does not report it (before 5.16).
    pub fn verified(&mut self, program: &str) -> Result<u32> {
        let info = if CLASSIFIERS.contains(&program) {
            classifier(&mut self.ebpf, program)?.info()?
        } else {
            xdp(&mut self.ebpf, program)?.info()?
        };
        info.verified_instruction_count().context("no count of verified instructions")
    }

    /// Total run time and number of runs of a program, while the kernel's run statistics are on.
    ///
    /// # Errors
    /// When the kernel does not report them.
    pub fn stats(&mut self, program: &str) -> Result<(Duration, u64)> {
        let info = xdp(&mut self.ebpf, program)?.info()?;
        Ok((info.run_time(), info.run_count()))
    }

    fn hash<K: aya::Pod, V: aya::Pod>(&mut self, name: &'static str) -> Result<HashMap<&mut MapData, K, V>> {
        Ok(HashMap::try_from(self.ebpf.map_mut(name).context(name)?)?)
    }
}

fn xdp<'a>(ebpf: &'a mut Ebpf, program: &str) -> Result<&'a mut Xdp> {
    let found =
        ebpf.program_mut(program).with_context(|| format!("the object has no program `{program}`"))?;
    Ok(found.try_into()?)
}

fn classifier<'a>(ebpf: &'a mut Ebpf, program: &str) -> Result<&'a mut SchedClassifier> {
    let found =
        ebpf.program_mut(program).with_context(|| format!("the object has no program `{program}`"))?;
    Ok(found.try_into()?)
}
