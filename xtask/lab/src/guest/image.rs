//! Makes the guest's disk: Debian 12 by debootstrap, written to an ext4 file without mounting anything.

use anyhow::{Context as _, Result, bail};
use std::fs::{self, File, Permissions};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use support::netns::run;

const SUITE: &str = "bookworm";
/// The mirror for machines whose apt has no source for [`SUITE`].
const DEFAULT_MIRROR: &str = "http://deb.debian.org/debian";
/// The guest's packages, in addition to debootstrap's minbase.
const PACKAGES: &[&str] = &[
    "cloud-init",
    // cloud-init depends on this one through virtual packages, which debootstrap does not resolve.
    "python3-cffi-backend",
    "ifupdown",
    "iproute2",
    "isc-dhcp-client",
    "linux-image-cloud-amd64",
    "netbase",
    // For ssh-keygen, because a first boot makes host keys.
    "openssh-client",
    "sudo",
    "systemd-sysv",
    "udev",
    // Packs the initrd; an emulated processor unpacks gzip more slowly.
    "zstd",
];
/// Files that replace or complete those of the packages: path, mode, content.
const FILES: &[(&str, u32, &str)] = &[
    ("usr/local/sbin/boot-report", 0o755, include_str!("recipe/boot-report.py")),
    ("etc/systemd/system/boot-report.service", 0o644, include_str!("recipe/boot-report.service")),
    ("etc/cloud/cloud.cfg.d/90-guest.cfg", 0o644, include_str!("recipe/90-guest.cfg")),
    ("etc/default/locale", 0o644, "LANG=C.UTF-8\n"),
    ("etc/fstab", 0o644, "/dev/vda / ext4 defaults 0 0\n"),
    ("etc/hostname", 0o644, "unnamed\n"),
    // debootstrap leaves this machine's resolver configuration there. In its local stage, cloud-init looks up three or
    // four names before it requests metadata. A resolver that never answers costs 10 s for each.
    ("etc/resolv.conf", 0o644, "# None: questions are refused at once.\n"),
    ("etc/initramfs-tools/conf.d/guest", 0o644, "MODULES=list\nCOMPRESS=zstd\n"),
    ("etc/initramfs-tools/modules", 0o644, "virtio_pci\nvirtio_blk\next4\n"),
];
/// Units that take an emulated processor seconds and are unrelated to metadata.
const MASKED: &[&str] = &[
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty-static.service",
    "getty@tty1.service",
    "serial-getty@ttyS0.service",
    "serial-getty@ttyS1.service",
    "systemd-logind.service",
];
/// Directories removed from the disk: a third of its size, without effect on its behaviour.
const PRUNED: &[&str] = &["usr/share/doc", "usr/share/locale", "usr/share/man"];
/// The size of the disk. The file is sparse.
const DISK_SIZE: &str = "1500M";
/// The number of packages between two progress lines.
const PROGRESS_EVERY: u32 = 50;

/// A finished image: the files that a boot needs, in one directory.
#[derive(Debug)]
pub(super) struct Image {
    directory: PathBuf,
}

impl Image {
    /// Returns the path of the root file system. A boot never writes to it.
    pub(super) fn disk(&self) -> PathBuf {
        self.directory.join("disk.img")
    }

    /// Returns the path of the kernel from the guest's own package.
    pub(super) fn kernel(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    /// Returns the path of the initrd that the package made.
    pub(super) fn initrd(&self) -> PathBuf {
        self.directory.join("initrd.img")
    }

    fn is_whole(&self) -> bool {
        [self.disk(), self.kernel(), self.initrd()].iter().all(|path| path.is_file())
    }
}

/// Returns the image of the current recipe below `cache`, and makes it if it is missing.
pub(super) fn ready(cache: &Path, rebuild: bool) -> Result<Image> {
    let image = Image { directory: cache.join(key()) };
    if image.is_whole() && !rebuild {
        return Ok(image);
    }
    let started = Instant::now();
    println!("image: making Debian {SUITE} in {} (once; takes some minutes)", image.directory.display());
    let work = cache.join(format!("work-{}", std::process::id()));
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    let made = make(&work, cache);
    let kept = match made {
        Ok(()) => publish(&work, &image.directory),
        Err(error) => Err(error),
    };
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
    }
    kept?;
    forget_others(cache, &image.directory)?;
    println!("image: made in {:.0} s", started.elapsed().as_secs_f64());
    Ok(image)
}

fn publish(work: &Path, directory: &Path) -> Result<()> {
    fs::remove_dir_all(work.join("tree"))?;
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::rename(work, directory)
        .with_context(|| format!("cannot rename the new directory to {}", directory.display()))
}

/// Removes images of other recipes: each takes hundreds of megabytes, and no boot will use them again.
fn forget_others(cache: &Path, kept: &Path) -> Result<()> {
    let ours = format!("{SUITE}-");
    for entry in fs::read_dir(cache)? {
        let path = entry?.path();
        let is_image = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&ours));
        if is_image && path != kept {
            fs::remove_dir_all(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// Returns a name for the recipe, which changes with every change of the recipe.
fn key() -> String {
    let mut hasher = DefaultHasher::new();
    (SUITE, PACKAGES, FILES, MASKED, PRUNED, DISK_SIZE).hash(&mut hasher);
    format!("{SUITE}-{:016x}", hasher.finish())
}

fn make(work: &Path, cache: &Path) -> Result<()> {
    let tree = work.join("tree");
    debootstrap(&tree, cache)?;
    println!("image: adding the recipe's files");
    lay_over(&tree)?;
    run(Command::new("chroot").arg(&tree).args(["update-initramfs", "-u"]))?;
    for (link, name) in [("vmlinuz", "vmlinuz"), ("initrd.img", "initrd.img")] {
        fs::copy(tree.join(link), work.join(name)).with_context(|| format!("the tree has no {link}"))?;
    }
    println!("image: writing the file system");
    run(Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-L", "root", "-d"])
        .args([&tree, &work.join("disk.img")])
        .arg(DISK_SIZE))?;
    Ok(())
}

fn debootstrap(tree: &Path, cache: &Path) -> Result<()> {
    let packages = cache.join("packages");
    fs::create_dir_all(&packages)?;
    let packages = packages.canonicalize()?;
    let log_path = cache.join("debootstrap.log");
    let mut log = File::create(&log_path)?;
    // A mount namespace of its own removes debootstrap's mounts, even if debootstrap fails.
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "debootstrap", "--variant=minbase"]);
    command.arg(format!("--include={}", PACKAGES.join(",")));
    command.arg(format!("--cache-dir={}", packages.display()));
    command.arg(SUITE).arg(tree).arg(mirror());
    if let Some(proxy) = proxy() {
        command.env("http_proxy", proxy);
    }
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log.try_clone()?)
        .spawn()
        .context("cannot run debootstrap")?;
    let stdout = child.stdout.take().context("standard output is not piped")?;
    let mut progress = Progress::default();
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        writeln!(log, "{line}")?;
        progress.see(&line);
    }
    let status = child.wait()?;
    if !status.success() {
        let text = fs::read_to_string(&log_path).unwrap_or_default();
        let lines: Vec<_> = text.lines().rev().take(5).collect();
        let tail: Vec<_> = lines.into_iter().rev().collect();
        bail!("debootstrap: {status}; {} ends with:\n{}", log_path.display(), tail.join("\n"));
    }
    Ok(())
}

/// Reduces debootstrap's line per package to one line per phase and per [`PROGRESS_EVERY`] packages.
#[derive(Debug, Default)]
struct Progress {
    phase: String,
    packages: u32,
}

impl Progress {
    fn see(&mut self, line: &str) {
        let Some(verb) = line.strip_prefix("I: ").and_then(|rest| rest.split(' ').next()) else { return };
        // debootstrap alternates between two verbs while it fetches; they count as one phase.
        let verb = if verb == "Validating" { "Retrieving" } else { verb };
        if verb == self.phase {
            self.packages += 1;
            if self.packages.is_multiple_of(PROGRESS_EVERY) {
                println!("image: {} … {}", verb.to_lowercase(), self.packages);
            }
        } else if ["Retrieving", "Extracting", "Unpacking", "Configuring"].contains(&verb) {
            verb.clone_into(&mut self.phase);
            self.packages = 1;
            println!("image: {} …", verb.to_lowercase());
        }
    }
}

/// Returns the mirror from which this machine's apt gets [`SUITE`].
fn mirror() -> String {
    let format = "$(REPO_URI) $(RELEASE) $(COMPONENT)";
    let mut command = Command::new("apt-get");
    command.args(["indextargets", "--format", format, "Created-By: Packages"]);
    let targets = run(&mut command).unwrap_or_default();
    let of_suite = targets.lines().find_map(|line| {
        let mut words = line.split(' ');
        let uri = words.next()?;
        (words.next() == Some(SUITE) && words.next() == Some("main")).then(|| uri.to_owned())
    });
    of_suite.unwrap_or_else(|| DEFAULT_MIRROR.to_owned())
}

/// Returns apt's HTTP proxy on this machine, if it has one.
fn proxy() -> Option<String> {
    let output =
        run(Command::new("apt-config").args(["dump", "--format", "%v", "Acquire::http::Proxy"])).ok()?;
    let proxy = output.trim();
    (!proxy.is_empty() && proxy != "DIRECT").then(|| proxy.to_owned())
}

fn lay_over(tree: &Path) -> Result<()> {
    for (path, mode, content) in FILES {
        let path = tree.join(path);
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        fs::set_permissions(&path, Permissions::from_mode(*mode))?;
    }
    let units = tree.join("etc/systemd/system");
    for unit in MASKED {
        let path = units.join(unit);
        if path.symlink_metadata().is_ok() {
            fs::remove_file(&path)?;
        }
        symlink("/dev/null", &path).with_context(|| format!("cannot mask {unit}"))?;
    }
    let wants = units.join("cloud-init.target.wants");
    fs::create_dir_all(&wants)?;
    symlink("/etc/systemd/system/boot-report.service", wants.join("boot-report.service"))?;
    for pruned in PRUNED {
        let path = tree.join(pruned);
        if path.exists() {
            fs::remove_dir_all(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}
