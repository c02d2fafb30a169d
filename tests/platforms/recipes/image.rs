//! A guest that boots quickly under emulation: Debian's kernel, and an initramfs with its unmodified cloud-init.

use anyhow::{Context as _, Result, ensure};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::netns::run;
use support::packages::{Packages, With};

const SUITE: &str = "bookworm";
/// The package of the newest kernel for clouds.
const KERNEL: &str = "?reverse-depends(?exact-name(linux-image-cloud-amd64))";
const PROGRAMS: &[&str] = &[
    "base-passwd",
    "busybox-static",
    "cloud-init",
    "coreutils",
    "dash",
    "grep",
    "hostname",
    "ifupdown",
    "kmod",
    "mawk",
    "mount",
    "python3-cffi-backend",
    "sed",
    "util-linux",
];
/// Parts of packages that cloud-init depends on and this guest never uses. They are a third of its size.
const LEFT_OUT: &str = "rm -rf usr/share/perl* usr/lib/*/perl* usr/share/i18n usr/lib/*/libperl*";
/// The drivers of a virtio NIC, in the order in which they can be loaded.
const MODULES: &[&str] = &[
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "failover",
    "net_failover",
    "virtio_net",
];
const INIT: &str = include_str!("init.sh");
const INTERFACES: &str = "auto lo\niface lo inet loopback\nsource /etc/network/interfaces.d/*\n";
/// Modules that show what came of the metadata. All others of Debian's image prepare a disk or install packages.
const STAGES: &str = "cloud_init_modules: [set_hostname]\ncloud_config_modules: [runcmd]\n\
                      cloud_final_modules: [scripts-user, final-message]\nusers: []\n";
/// Debian compiles Python when a package is installed. An emulated processor would do it at each boot.
const COMPILE: &str = "\
import cloudinit.cmd.main, cloudinit.distros.debian, cloudinit.net.eni, cloudinit.sources.DataSourceNoCloud, \
cloudinit.sources.DataSourceNone, cloudinit.config.cc_final_message, cloudinit.config.cc_runcmd, \
cloudinit.config.cc_scripts_user, cloudinit.config.cc_set_hostname
";

/// The files of a guest.
pub(super) struct Image {
    room: tempfile::TempDir,
    kernel: PathBuf,
    programs: Packages,
}

impl Image {
    /// Makes the guest; skips the test if Debian's packages are out of reach.
    #[track_caller]
    pub(super) fn or_skip() -> Option<Self> {
        let kernel = Packages::or_skip(SUITE, &[KERNEL], With::Nothing)?;
        let programs = Packages::or_skip(SUITE, PROGRAMS, With::Dependencies)?;
        Some(Self::make(kernel.root(), programs).expect("an initramfs"))
    }

    fn make(kernel: &Path, programs: Packages) -> Result<Self> {
        let room = tempfile::tempdir()?;
        let tree = room.path().join("tree");
        // Other tests use the packages too, so nothing is written to them.
        run(Command::new("cp").args(["--archive", "--reflink=auto"]).arg(programs.root()).arg(&tree))?;
        run(Command::new("sh").args(["-c", LEFT_OUT]).current_dir(&tree))?;
        for directory in ["proc", "sys", "dev", "run", "tmp", "root", "modules", "etc/network/interfaces.d"] {
            fs::create_dir_all(tree.join(directory))?;
        }
        fs::write(tree.join("init"), INIT)?;
        fs::set_permissions(tree.join("init"), Permissions::from_mode(0o755))?;
        fs::write(tree.join("etc/network/interfaces"), INTERFACES)?;
        fs::write(tree.join("etc/cloud/cloud.cfg.d/90-guest.cfg"), STAGES)?;
        fs::write(tree.join("modules/list"), MODULES.join("\n") + "\n")?;
        for module in MODULES {
            let name = format!("{module}.ko");
            fs::copy(found(&kernel.join("lib/modules"), &name)?, tree.join("modules").join(&name))?;
        }
        let mut compile = Command::new("chroot");
        compile.arg(&tree).args(["/usr/bin/python3", "-c", COMPILE]);
        run(compile.env_remove("PYTHONDONTWRITEBYTECODE"))?;
        let pack = "find . | usr/bin/busybox cpio -o -H newc >../initramfs";
        run(Command::new("sh").args(["-c", pack]).current_dir(&tree))?;
        fs::remove_dir_all(&tree)?;
        let kernel = found(&kernel.join("boot"), "vmlinuz-*")?;
        Ok(Self { room, kernel, programs })
    }

    pub(super) fn kernel(&self) -> &Path {
        &self.kernel
    }

    pub(super) fn initramfs(&self) -> PathBuf {
        self.room.path().join("initramfs")
    }

    /// A static busybox, which has a DHCP server.
    pub(super) fn busybox(&self) -> PathBuf {
        self.programs.root().join("usr/bin/busybox")
    }
}

/// The only file of this name below a directory.
fn found(below: &Path, name: &str) -> Result<PathBuf> {
    let list = run(Command::new("find").arg(below).args(["-name", name]))?;
    let mut lines = list.lines();
    let path = lines.next().with_context(|| format!("no {name} in {}", below.display()))?;
    ensure!(lines.next().is_none(), "several files {name} in {}:\n{list}", below.display());
    Ok(path.into())
}
