//! The eBPF object: loaded once for the hub, and its `port` program once more per namespace with ports.
//!
//! A frame tells the interface it came in by, but not the namespace, and interface indexes repeat. So
//! each namespace gets an instance of its own, told its number by the constant `NETNS`; all instances
//! share one set of maps. The loader shares maps by pinning only, hence a bpffs: one that is mounted
//! nowhere, reached through its descriptor, and gone with the process even if that is killed.

use aya::programs::Xdp;
use aya::{Ebpf, EbpfLoader};
use aya_obj::programs::XdpAttachType;
use metadata_common::maps::{name, program};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::PathBuf;

use super::SteerError;
use super::netns::{Cookie, MAX_NAMESPACES};

/// Built from `metadata-ebpf` by `cargo xtask build-ebpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../../metadata-ebpf/prebuilt/xdp-imds.bpf.o");

/// Maps all instances share: every one of the object's but its constants.
const SHARED: [&str; 10] = [
    name::PORTS,
    name::IDENTITIES,
    name::GUESTS,
    name::GUEST_DEVICES,
    name::HUBS,
    name::SOCKETS,
    name::SERVED_V4,
    name::SERVED_V6,
    name::COUNTERS,
    // The ring of the kernel side's log, as aya-log calls it.
    "AYA_LOGS",
];

/// The number of the instance that has no ports.
const HUB_INSTANCE: usize = 0;

/// Every number a namespace can have, each where the loader can refer to it for as long as it likes.
static NUMBERS: [u32; MAX_NAMESPACES + 1] = {
    let mut numbers = [0; MAX_NAMESPACES + 1];
    let mut n = 0;
    while n < numbers.len() {
        numbers[n] = n as u32;
        n += 1;
    }
    numbers
};

/// The loader and the instances it has made.
pub(super) struct Object {
    /// Kept because making one parses the kernel's own type information, which takes longer than a load.
    loader: EbpfLoader<'static>,
    pins: Pins,
    instances: BTreeMap<Cookie, Instance>,
    free: Vec<usize>,
}

/// The `port` program for one namespace.
struct Instance {
    number: usize,
    program: Xdp,
    ports: usize,
}

impl Object {
    /// Loads the object for the hub; the maps are in what is returned beside it.
    pub(super) fn load() -> Result<(Self, Ebpf), SteerError> {
        let pins = Pins::create()?;
        let mut loader = EbpfLoader::new();
        for map in SHARED {
            loader.map_pin_path(map, pins.path(map));
        }
        let free = (HUB_INSTANCE + 1..NUMBERS.len()).rev().collect();
        let mut object = Self { loader, pins, instances: BTreeMap::new(), free };
        let hub = object.instantiate(HUB_INSTANCE)?;
        Ok((object, hub))
    }

    fn instantiate(&mut self, number: usize) -> Result<Ebpf, SteerError> {
        self.loader
            .override_global(name::NETNS, &NUMBERS[number], true)
            .load(OBJECT)
            .map_err(|source| SteerError::load("object", source))
    }

    /// Counts one more port in a namespace; returns the namespace's number and its `port` program.
    ///
    /// Pair it with [`Object::release`], also when the port then comes to nothing.
    pub(super) fn acquire(&mut self, cookie: Cookie) -> Result<(u32, &mut Xdp), SteerError> {
        if !self.instances.contains_key(&cookie) {
            let number = self.free.pop().ok_or(SteerError::TooManyNamespaces)?;
            let program = self.port_program(number).inspect_err(|_| self.free.push(number))?;
            self.instances.insert(cookie, Instance { number, program, ports: 0 });
        }
        let instance = self.instances.get_mut(&cookie).expect("it was there or has just been inserted");
        instance.ports += 1;
        Ok((NUMBERS[instance.number], &mut instance.program))
    }

    /// Counts one port less; with the last of a namespace its instance goes.
    pub(super) fn release(&mut self, cookie: Cookie) {
        let Some(instance) = self.instances.get_mut(&cookie) else { return };
        instance.ports -= 1;
        if instance.ports == 0 {
            let number = instance.number;
            self.instances.remove(&cookie);
            self.free.push(number);
        }
    }

    /// A loaded `port` program and nothing else: the loader's own copy of the object and its descriptors
    /// of the maps would cost every namespace a hundredfold.
    fn port_program(&mut self, number: usize) -> Result<Xdp, SteerError> {
        let mut ebpf = self.instantiate(number)?;
        let loaded = load_program(&mut ebpf, program::PORT)?;
        let path = self.pins.path(program::PORT);
        let failed = |source| SteerError::load(format!("program {}", program::PORT), source);
        loaded.pin(&path).map_err(|source| SteerError::load("program's pin", source))?;
        let program = Xdp::from_pin(&path, XdpAttachType::Interface).map_err(failed);
        std::fs::remove_file(&path)
            .map_err(|source| SteerError::device("remove the program's pin", source))?;
        program
    }
}

/// Loads one program into the kernel.
pub(super) fn load_program<'e>(ebpf: &'e mut Ebpf, name: &'static str) -> Result<&'e mut Xdp, SteerError> {
    let part = || format!("program {name}");
    let program =
        ebpf.program_mut(name).ok_or_else(|| SteerError::load(part(), "the object has no such program"))?;
    let program: &mut Xdp = program.try_into().map_err(|source| SteerError::load(part(), source))?;
    program.load().map_err(|source| SteerError::load(part(), source))?;
    Ok(program)
}

/// A bpffs of our own.
struct Pins(OwnedFd);

impl Pins {
    fn create() -> Result<Self, SteerError> {
        let mount = || -> io::Result<OwnedFd> {
            let bpffs = fsopen("bpf", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_create(&bpffs)?;
            Ok(fsmount(&bpffs, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC)?)
        };
        mount().map(Self).map_err(|source| SteerError::device("make a private bpffs", source))
    }

    fn path(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::{NUMBERS, OBJECT, SHARED};
    use metadata_common::maps::name;

    #[test]
    fn every_map_of_the_object_but_its_constants_is_shared() {
        let object = aya_obj::Object::parse(OBJECT).expect("the embedded object parses");
        let mut maps: Vec<&str> =
            object.maps.keys().map(String::as_str).filter(|map| !map.starts_with('.')).collect();
        maps.sort_unstable();
        let mut shared = SHARED.to_vec();
        shared.sort_unstable();
        assert_eq!(maps, shared);
    }

    #[test]
    fn the_object_can_be_told_its_namespace() {
        let mut object = aya_obj::Object::parse(OBJECT).expect("the embedded object parses");
        let number = NUMBERS[7].to_ne_bytes();
        let told = object.patch_map_data([(name::NETNS, (number.as_slice(), true))].into());
        assert!(told.is_ok(), "{told:?}");
    }

    #[test]
    fn every_namespace_has_a_number_of_its_own() {
        assert!((0..).zip(NUMBERS).all(|(n, number): (u32, u32)| n == number));
    }
}
