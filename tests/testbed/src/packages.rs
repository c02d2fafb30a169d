//! Debian packages of any suite, downloaded and unpacked into a directory. They are not installed.
//!
//! apt runs with its own root. Its only source is one suite of the machine's Debian mirror, its list of installed
//! packages is empty, and none of the machine's hooks run. It therefore resolves all dependencies within the suite, and
//! `/etc/apt` and dpkg's database stay unchanged. No maintainer script runs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, bail, ensure};

use crate::netns::run;
use crate::privileged;

/// apt's pattern for the essential packages of a Debian system, such as a shell and basic tools. With a program's own
/// package they make a root in which the program runs by `chroot`.
pub const ESSENTIAL: &str = "?essential";
/// What runs Neutron's metadata agent for OVN as on a compute node, and has the schemas of its databases.
pub const NEUTRON: [&str; 6] =
    [ESSENTIAL, "neutron-ovn-metadata-agent", "haproxy", "iproute2", "openvswitch-switch", "ovn-central"];
/// Keyrings of Debian's archive, with the file names of Debian 12 and 13. If neither exists, apt uses its trusted keys.
const KEYRINGS: [&str; 2] =
    ["/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.pgp"];
/// Directories that are links into `/usr` in Debian 12 and later. Packages of earlier releases unpack the same way.
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];
/// Directories that no program needs. They take most of the space.
const LEFT_OUT: [&str; 4] =
    ["./usr/share/doc/*", "./usr/share/man/*", "./usr/share/locale/*", "./usr/share/info/*"];
/// The file in an unpacked root that lists its packages, `NAME VERSION` on each line.
const LIST: &str = ".packages";
/// The version of unpacking. It increases when unpacking changes, so that a test does not use an older tree.
const LAYOUT: u32 = 1;

/// Whether to include dependencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum With {
    /// All direct and indirect dependencies. With [`ESSENTIAL`] they make a root for `chroot`.
    Dependencies,
    /// No dependencies, for programs that run in this machine's root.
    Nothing,
}

/// Unpacked packages of one suite. All tests share the directory, and none writes to it.
#[derive(Clone, Debug)]
pub struct Packages {
    root: PathBuf,
    versions: BTreeMap<String, String>,
}

impl Packages {
    /// Returns the packages. Skips the test like [`privileged::or_skip`] if privileges, apt or its mirror are missing.
    ///
    /// # Panics
    /// When something is missing and `XDP_IMDS_REQUIRE_PRIVILEGED` is 1.
    #[must_use]
    #[track_caller]
    pub fn or_skip(suite: &str, names: &[&str], with: With) -> Option<Self> {
        let ready = match privileged::missing() {
            Some(reason) => Err(reason.to_owned()),
            None => Self::get(suite, names, with)
                .map_err(|error| format!("it cannot get {} of {suite}: {error:#}", names.join(" "))),
        };
        privileged::or_skip_for(ready.as_ref().err().map(String::as_str)).then(|| ready.ok())?
    }

    /// Downloads and unpacks packages below the target directory, once for each set of packages.
    ///
    /// # Errors
    /// When apt or dpkg is missing, apt names no mirror of Debian, the mirror is out of reach, or the suite has no
    /// package of a name.
    pub fn get(suite: &str, names: &[&str], with: With) -> Result<Self> {
        Self::get_for(None, suite, names, with)
    }

    /// Like [`Packages::get`], for the processors that Debian calls `architecture`; `None` means this machine's.
    ///
    /// # Errors
    /// Like [`Packages::get`].
    pub fn get_for(architecture: Option<&str>, suite: &str, names: &[&str], with: With) -> Result<Self> {
        // Without the lock, two threads could download the same packages.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let own = std::env::current_exe().context("cannot find the running program's own file")?;
        // `own` is target/<profile>/deps/<test>. All profiles share the packages.
        let target = own.ancestors().find(|path| path.ends_with("target")).context("not inside target/")?;
        let mut hasher = DefaultHasher::new();
        (LAYOUT, suite, names, with).hash(&mut hasher);
        if let Some(architecture) = architecture {
            architecture.hash(&mut hasher);
        }
        let root = target.join(format!("packages-{suite}-{:016x}", hasher.finish()));
        if !root.is_dir() {
            let aside = tempfile::tempdir_in(target).context("cannot unpack below target/")?;
            let apt = Apt::new(aside.path(), suite, architecture)?;
            let tree = unpack(&apt.fetch(names, with)?, aside.path())?;
            if let Err(error) = fs::rename(&tree, &root)
                && !root.is_dir()
            {
                // The error counts only if no other test program has unpacked them in the meantime.
                return Err(error).with_context(|| format!("cannot put {} in place", root.display()));
            }
        }
        let list = fs::read_to_string(root.join(LIST)).context("an unpacked root has no list of packages")?;
        let versions = list.lines().filter_map(|line| line.split_once(' '));
        let versions = versions.map(|(name, version)| (name.to_owned(), version.to_owned())).collect();
        Ok(Self { root, versions })
    }

    /// The directory of the unpacked files, with `usr/`, `etc/` and so on. A program that writes needs an overlay or a
    /// copy.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The version of a package.
    #[must_use]
    pub fn version(&self, package: &str) -> Option<&str> {
        self.versions.get(package).map(String::as_str)
    }
}

/// An apt with its own root.
struct Apt {
    directory: PathBuf,
    configuration: PathBuf,
}

impl Apt {
    fn new(aside: &Path, suite: &str, architecture: Option<&str>) -> Result<Self> {
        let is_word = |word: &str| word.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '-');
        ensure!(is_word(suite), "`{suite}` is not the name of a suite");
        ensure!(architecture.is_none_or(is_word), "`{architecture:?}` is not the name of an architecture");
        let directory = aside.join("apt");
        for path in ["state/lists/partial", "cache/archives/partial", "parts"] {
            fs::create_dir_all(directory.join(path))?;
        }
        let signed = KEYRINGS.into_iter().find(|path| Path::new(path).is_file());
        let signed = signed.map_or_else(String::new, |path| format!("[signed-by={path}] "));
        fs::write(directory.join("sources.list"), format!("deb {signed}{} {suite} main\n", mirror()?))?;
        fs::write(directory.join("status"), "")?;
        let configuration = directory.join("apt.conf");
        let mut settings = acquiring()?;
        if let Some(architecture) = architecture {
            settings +=
                &format!("APT::Architecture \"{architecture}\";\nAPT::Architectures \"{architecture}\";\n");
        }
        fs::write(&configuration, settings)?;
        let apt = Self { directory, configuration };
        apt.run("apt-get", &["--quiet", "update"]).context("cannot read the mirror's lists")?;
        Ok(apt)
    }

    /// Downloads packages. Returns their files.
    fn fetch(&self, names: &[&str], with: With) -> Result<Vec<PathBuf>> {
        let archives = self.directory.join("cache/archives");
        let words: &[&str] = match with {
            With::Dependencies => {
                &["--quiet", "--yes", "--no-install-recommends", "--download-only", "install"]
            }
            With::Nothing => &["--quiet", "download"],
        };
        self.run("apt-get", &[words, names].concat())?;
        let mut files = Vec::new();
        for entry in fs::read_dir(&archives)? {
            files.push(entry?.path());
        }
        files.retain(|path| path.extension().is_some_and(|extension| extension == "deb"));
        files.sort();
        ensure!(!files.is_empty(), "apt downloaded no package");
        Ok(files)
    }

    fn run(&self, program: &str, words: &[&str]) -> Result<String> {
        let mut command = Command::new(program);
        // apt reads this file first. It disables all other configuration.
        command.env("APT_CONFIG", &self.configuration).env("DEBIAN_FRONTEND", "noninteractive");
        for (name, path) in [
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::Etc::sourceparts", "parts"),
            ("Dir::Etc::preferences", "none"),
            ("Dir::Etc::preferencesparts", "parts"),
            ("Dir::State", "state"),
            ("Dir::State::status", "status"),
            ("Dir::Cache", "cache"),
        ] {
            let mut option = OsString::from(format!("{name}="));
            option.push(self.directory.join(path));
            command.arg("-o").arg(option);
        }
        // As root, apt would change to a user without permission to write here.
        command.args(["-o", "APT::Sandbox::User=root"]);
        run(command.args(words).current_dir(self.directory.join("cache/archives")))
    }
}

/// The machine's apt settings for downloads, such as a proxy, without its hooks.
fn acquiring() -> Result<String> {
    let dump = run(Command::new("apt-config").arg("dump"))?;
    let acquire: Vec<&str> = dump.lines().filter(|line| line.starts_with("Acquire::")).collect();
    let own = "Dir::Etc::main \"none\";\nDir::Etc::parts \"none\";\nAcquire::Languages \"none\";\n\
               Acquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n";
    Ok(format!("{}\n{own}", acquire.join("\n")))
}

/// The Debian mirror of the machine's apt, of any suite.
fn mirror() -> Result<String> {
    let format = "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)";
    let targets =
        run(Command::new("apt-get").args(["indextargets", "--format", format, "Created-By: Packages"]))?;
    // Updates and security fixes have other mirrors; their suites have a hyphen in the name. apt knows the origin only
    // after it has downloaded lists.
    let mirror = targets.lines().find_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
        [uri, suite, "main", "Debian" | "$(ORIGIN)" | ""] if !suite.contains('-') => Some(uri.to_owned()),
        _ => None,
    });
    mirror.context("this machine's apt names no mirror of Debian")
}

/// Unpacks packages and lists them.
fn unpack(files: &[PathBuf], aside: &Path) -> Result<PathBuf> {
    let tree = aside.join("tree");
    for name in MERGED {
        fs::create_dir_all(tree.join("usr").join(name))?;
        symlink(Path::new("usr").join(name), tree.join(name))?;
    }
    let mut list = String::new();
    for file in files {
        extract(file, &tree).with_context(|| format!("cannot unpack {}", file.display()))?;
        let format = "--showformat=${Package} ${Version}\n";
        list += &run(Command::new("dpkg-deb").args(["--show", format]).arg(file))?;
    }
    fs::write(tree.join(LIST), list)?;
    // Normally a maintainer script creates these files.
    for name in ["passwd", "group"] {
        let (master, file) = (format!("usr/share/base-passwd/{name}.master"), format!("etc/{name}"));
        if tree.join(&master).is_file() {
            fs::copy(tree.join(&master), tree.join(&file))?;
        }
    }
    Ok(tree)
}

/// Unpacks with tar, because dpkg would replace a link to a directory by a directory.
fn extract(file: &Path, tree: &Path) -> Result<()> {
    let mut dpkg = Command::new("dpkg-deb").arg("--fsys-tarfile").arg(file).stdout(Stdio::piped()).spawn()?;
    let archive = dpkg.stdout.take().context("standard output is piped")?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--keep-directory-symlink", "--no-same-owner", "--no-same-permissions"]);
    tar.args(LEFT_OUT.map(|pattern| format!("--exclude={pattern}"))).arg("--directory").arg(tree);
    let output = tar.stdin(archive).output()?;
    let unpacked = dpkg.wait()?;
    if !unpacked.success() || !output.status.success() {
        bail!("dpkg-deb: {unpacked}; tar: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

// Releases from the Python package registry, installed below a directory of the build.

/// The distribution's interpreter. Another one on PATH can be in a home directory that a guest or another user does
/// not see.
pub const PYTHON: &str = "/usr/bin/python3";

/// Installs the releases that `requirements` names with their hashes, unless this was done before. Returns the
/// directory, `<below>/<name>-<digest>`; the digest changes with the requirements and the interpreter.
///
/// pip accepts wheels only, so that the installation runs no code of the packages.
///
/// # Errors
/// When Python or pip is missing, the registry is out of reach, or a file does not have its hash.
pub fn install_wheels(requirements: &str, below: &Path, name: &str) -> Result<PathBuf> {
    let version =
        run(Command::new(PYTHON).arg("--version")).context("`apt-get install python3` installs Python")?;
    let mut hasher = DefaultHasher::new();
    (requirements, version).hash(&mut hasher);
    let root = below.join(format!("{name}-{:016x}", hasher.finish()));
    if root.is_dir() {
        return Ok(root);
    }
    fs::create_dir_all(below).with_context(|| format!("cannot create {}", below.display()))?;
    let aside =
        tempfile::tempdir_in(below).with_context(|| format!("cannot write to {}", below.display()))?;
    let (list, tree) = (aside.path().join("requirements.txt"), aside.path().join("tree"));
    fs::write(&list, requirements)?;
    let mut pip = Command::new(PYTHON);
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--retries=2",
        "--disable-pip-version-check",
        "--no-compile",
    ]);
    pip.args(["--root-user-action=ignore", "--require-hashes", "--no-deps", "--only-binary=:all:"]);
    pip.arg("--target").arg(&tree).arg("--requirement").arg(&list);
    run(&mut pip).context("`apt-get install python3-pip` installs pip")?;
    if let Err(error) = fs::rename(&tree, &root)
        && !root.is_dir()
    {
        // The error counts only if no other program has installed them in the meantime.
        return Err(error).with_context(|| format!("cannot put {} in place", root.display()));
    }
    Ok(root)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::{ESSENTIAL, Packages, With};

    #[test]
    fn a_package_is_unpacked_without_its_dependencies() {
        let Some(packages) = Packages::or_skip("bookworm", &["hostname"], With::Nothing) else { return };
        assert!(
            packages.version("hostname").is_some_and(|version| version.starts_with("3.")),
            "{packages:?}"
        );
        assert!(packages.root().join("bin/hostname").is_file());
        assert!(packages.version("libc6").is_none());
    }

    #[test]
    fn a_program_runs_in_the_root_of_another_suite() {
        let Some(packages) = Packages::or_skip("bullseye", &[ESSENTIAL], With::Dependencies) else { return };
        let mut command = Command::new("chroot");
        command.arg(packages.root()).args(["/bin/sh", "-c", ". /etc/os-release; echo $VERSION_ID"]);
        let output = command.output().expect("chroot runs");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "11\n", "{output:?}");
    }

    #[test]
    fn the_error_names_a_package_that_does_not_exist() {
        let Some(_) = Packages::or_skip("bookworm", &["hostname"], With::Nothing) else { return };
        let error = Packages::get("bookworm", &["no-such-package"], With::Nothing);
        assert!(format!("{:#}", error.expect_err("no package")).contains("no-such-package"));
    }
}
