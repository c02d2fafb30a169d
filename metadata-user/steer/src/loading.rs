//! Loads single programs of an object into the kernel, and keeps nothing else of it.

use aya::Ebpf;
use aya::programs::{SchedClassifier, Xdp};
use aya_obj::programs::XdpAttachType;
use metadata_common::maps::name;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::PathBuf;

use super::SteerError;
use super::error::errno;
use metadata_links::MAX_NAMESPACES;

/// Attempts to load a program, as many as libbpf makes.
const ATTEMPTS: u32 = 5;

/// Every number of a namespace, in static memory because the loader keeps a reference to it.
pub(super) static NUMBERS: [u32; MAX_NAMESPACES + 1] = {
    let mut numbers = [0; MAX_NAMESPACES + 1];
    let mut n = 0;
    while n < numbers.len() {
        numbers[n] = n as u32;
        n += 1;
    }
    numbers
};

/// Loads a program and drops the loader's copy of the object and its map descriptors. They would multiply the memory
/// of each namespace by a hundred.
pub(super) fn keep_program(ebpf: &mut Ebpf, name: &'static str, pins: &Private) -> Result<Xdp, SteerError> {
    let loaded = load_program(ebpf, name)?;
    let path = pins.path(name);
    let failed = |source| SteerError::load(format!("program {name}"), source);
    loaded.pin(&path).map_err(|source| SteerError::load("program's pin", source))?;
    let program = Xdp::from_pin(&path, XdpAttachType::Interface).map_err(failed);
    std::fs::remove_file(&path).map_err(|source| SteerError::device("remove the program's pin", source))?;
    program
}

/// Like [`keep_program`], for a classifier.
pub(super) fn keep_classifier(
    ebpf: &mut Ebpf,
    name: &'static str,
    pins: &Private,
) -> Result<SchedClassifier, SteerError> {
    let loaded = load_classifier(ebpf, name)?;
    let path = pins.path(name);
    let failed = |source| SteerError::load(format!("program {name}"), source);
    loaded.pin(&path).map_err(|source| SteerError::load("classifier's pin", source))?;
    let classifier = SchedClassifier::from_pin(&path).map_err(failed);
    std::fs::remove_file(&path)
        .map_err(|source| SteerError::device("remove the classifier's pin", source))?;
    classifier
}

/// Loads one program into the kernel.
pub(super) fn load_program<'e>(ebpf: &'e mut Ebpf, name: &'static str) -> Result<&'e mut Xdp, SteerError> {
    let part = || format!("program {name}");
    let program =
        ebpf.program_mut(name).ok_or_else(|| SteerError::load(part(), "the object has no such program"))?;
    let program: &mut Xdp = program.try_into().map_err(|source| SteerError::load(part(), source))?;
    uninterrupted(|| program.load()).map_err(|source| SteerError::load(part(), source))?;
    Ok(program)
}

/// Like [`load_program`], for a classifier.
pub(super) fn load_classifier<'e>(
    ebpf: &'e mut Ebpf,
    name: &'static str,
) -> Result<&'e mut SchedClassifier, SteerError> {
    let part = || format!("program {name}");
    let program =
        ebpf.program_mut(name).ok_or_else(|| SteerError::load(part(), "the object has no such program"))?;
    let program: &mut SchedClassifier =
        program.try_into().map_err(|source| SteerError::load(part(), source))?;
    uninterrupted(|| program.load()).map_err(|source| SteerError::load(part(), source))?;
    Ok(program)
}

/// Loads a program, again if a signal for this thread ended the verification (`EAGAIN` of `bpf_check`,
/// kernel/bpf/verifier.c).
pub(super) fn uninterrupted<E: std::error::Error + 'static>(
    mut load: impl FnMut() -> Result<(), E>,
) -> Result<(), E> {
    for _ in 1..ATTEMPTS {
        match load() {
            Err(error) if errno(&error) == Some(libc::EAGAIN) => {}
            outcome => return outcome,
        }
    }
    load()
}

/// A private bpffs.
pub(super) struct Private(OwnedFd);

impl Private {
    pub(super) fn create() -> Result<Self, SteerError> {
        let mount = || -> io::Result<OwnedFd> {
            let bpffs = fsopen("bpf", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_create(&bpffs)?;
            Ok(fsmount(&bpffs, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC)?)
        };
        mount().map(Self).map_err(|source| SteerError::device("make a private bpffs", source))
    }

    pub(super) fn path(&self, map: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{}", self.0.as_raw_fd(), name::pin(map)).into()
    }
}

#[cfg(test)]
mod tests {
    use super::{ATTEMPTS, uninterrupted};
    use std::io;

    #[test]
    fn only_an_interrupted_load_is_tried_again_and_not_for_ever() {
        for (errno, interrupted, loads, succeeds) in [
            (libc::EAGAIN, 0, 1, true),
            (libc::EAGAIN, 2, 3, true),
            (libc::EAGAIN, ATTEMPTS, ATTEMPTS, false),
            (libc::EPERM, 1, 1, false),
        ] {
            let mut count = 0;
            let outcome = uninterrupted(|| {
                count += 1;
                if count <= interrupted { Err(io::Error::from_raw_os_error(errno)) } else { Ok(()) }
            });
            assert_eq!((count, outcome.is_ok()), (loads, succeeds), "{interrupted} times {errno}");
        }
    }
}
