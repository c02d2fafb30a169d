//! Debian packages of any suite, fetched past this machine's own apt and unpacked into a directory, not installed.
//!
//! apt runs with a root of its own: its sources are one suite of the mirror that this machine's apt takes Debian
//! from, its list of installed packages is empty, and no hook of the machine's runs. So it resolves all dependencies
//! within the suite, and neither `/etc/apt` nor dpkg's database changes. No maintainer script is run.

use crate::netns::run;
use crate::privileged;
use anyhow::{Context as _, Result, bail, ensure};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Names, in apt's words, of the packages that a Debian system has at least: a shell and the basic tools.
/// Beside a program's own package they make a root that the program can be run in with `chroot`.
pub const ESSENTIAL: &str = "?essential";
/// Keys of Debian's archive, of all its suites; by the file's names in Debian 12 and 13. Where neither exists, apt's
/// own trusted keys decide.
const KEYRINGS: [&str; 2] =
    ["/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.pgp"];
/// Directories that are links into `/usr` (Debian 12 and later; earlier packages unpack the same).
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];
/// What no program needs, and most of the octets.
const LEFT_OUT: [&str; 4] =
    ["./usr/share/doc/*", "./usr/share/man/*", "./usr/share/locale/*", "./usr/share/info/*"];
/// The file in an unpacked root that lists its packages, `NAME VERSION` on each line.
const LIST: &str = ".packages";
/// Counts up when unpacking changes, so that no older tree is taken for a new one.
const LAYOUT: u32 = 1;

/// Whether packages come with those they depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum With {
    /// All they depend on, and that depends on in turn: a root for `chroot` when [`ESSENTIAL`] is named too.
    Dependencies,
    /// Nothing: for programs that are run from this machine's root.
    Nothing,
}

/// Packages of one suite, unpacked. The directory belongs to every test and is never written to again.
#[derive(Clone, Debug)]
pub struct Packages {
    root: PathBuf,
    versions: BTreeMap<String, String>,
}

impl Packages {
    /// The packages when the calling test may go on; otherwise it skips as [`privileged::or_skip`] does, for lack of
    /// privilege, of apt or of its mirror.
    ///
    /// # Panics
    /// When something is missing where no test may skip.
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

    /// Fetches and unpacks packages below the target directory, once for each set of them.
    ///
    /// # Errors
    /// When apt or dpkg is missing, apt names no mirror of Debian, the mirror is out of reach, or the suite has no
    /// package of a name.
    pub fn get(suite: &str, names: &[&str], with: With) -> Result<Self> {
        // Two threads that want the same would fetch it twice.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let own = std::env::current_exe().context("cannot find the running program's own file")?;
        // target/<profile>/deps/<test>: packages serve every profile.
        let target = own.ancestors().find(|path| path.ends_with("target")).context("not inside target/")?;
        let mut hasher = DefaultHasher::new();
        (LAYOUT, suite, names, with).hash(&mut hasher);
        let root = target.join(format!("packages-{suite}-{:016x}", hasher.finish()));
        if !root.is_dir() {
            let aside = tempfile::tempdir_in(target).context("cannot unpack below target/")?;
            let apt = Apt::new(aside.path(), suite)?;
            let tree = unpack(&apt.fetch(names, with)?, aside.path())?;
            if let Err(error) = fs::rename(&tree, &root)
                && !root.is_dir()
            {
                // Not merely another test program that was quicker.
                return Err(error).with_context(|| format!("cannot put {} in place", root.display()));
            }
        }
        let list = fs::read_to_string(root.join(LIST)).context("an unpacked root lost its list")?;
        let versions = list.lines().filter_map(|line| line.split_once(' '));
        let versions = versions.map(|(name, version)| (name.to_owned(), version.to_owned())).collect();
        Ok(Self { root, versions })
    }

    /// The directory they are unpacked in, with `usr/`, `etc/` and so on below it. To be read only: put an overlay
    /// over it, or a copy in its place, for a program that writes.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The version of one of them.
    #[must_use]
    pub fn version(&self, package: &str) -> Option<&str> {
        self.versions.get(package).map(String::as_str)
    }
}

/// An apt with a root of its own.
struct Apt {
    directory: PathBuf,
    configuration: PathBuf,
}

impl Apt {
    fn new(aside: &Path, suite: &str) -> Result<Self> {
        ensure!(
            suite.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '-'),
            "{suite} is no suite's name"
        );
        let directory = aside.join("apt");
        for path in ["state/lists/partial", "cache/archives/partial", "parts"] {
            fs::create_dir_all(directory.join(path))?;
        }
        let signed = KEYRINGS.into_iter().find(|path| Path::new(path).is_file());
        let signed = signed.map_or_else(String::new, |path| format!("[signed-by={path}] "));
        fs::write(directory.join("sources.list"), format!("deb {signed}{} {suite} main\n", mirror()?))?;
        fs::write(directory.join("status"), "")?;
        let configuration = directory.join("apt.conf");
        fs::write(&configuration, acquiring()?)?;
        let apt = Self { directory, configuration };
        apt.run("apt-get", &["--quiet", "update"]).context("cannot read the mirror's lists")?;
        Ok(apt)
    }

    /// Downloads packages; their files.
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
        ensure!(!files.is_empty(), "apt brought no package");
        Ok(files)
    }

    fn run(&self, program: &str, words: &[&str]) -> Result<String> {
        let mut command = Command::new(program);
        // Read before any other configuration: it says where there is none.
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
        // As root, apt would drop to a user that may not write here.
        command.args(["-o", "APT::Sandbox::User=root"]);
        run(command.args(words).current_dir(self.directory.join("cache/archives")))
    }
}

/// What this machine's apt is told about fetching (its proxy, say), and none of its hooks.
fn acquiring() -> Result<String> {
    let dump = run(Command::new("apt-config").arg("dump"))?;
    let acquire: Vec<&str> = dump.lines().filter(|line| line.starts_with("Acquire::")).collect();
    let own = "Dir::Etc::main \"none\";\nDir::Etc::parts \"none\";\nAcquire::Languages \"none\";\n\
               Acquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n";
    Ok(format!("{}\n{own}", acquire.join("\n")))
}

/// The mirror this machine's apt takes Debian from, whatever its suite.
fn mirror() -> Result<String> {
    let format = "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)";
    let targets =
        run(Command::new("apt-get").args(["indextargets", "--format", format, "Created-By: Packages"]))?;
    // Updates and security fixes have mirrors of their own, and a dash in the name of their suites. The origin is
    // known once lists have been fetched.
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
    // The script of a package that is not run would put them there.
    for name in ["passwd", "group"] {
        let (master, file) = (format!("usr/share/base-passwd/{name}.master"), format!("etc/{name}"));
        if tree.join(&master).is_file() {
            fs::copy(tree.join(&master), tree.join(&file))?;
        }
    }
    Ok(tree)
}

/// dpkg's own way to unpack would put a directory in the place of a link to one.
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

#[cfg(test)]
mod tests {
    use super::{ESSENTIAL, Packages, With};
    use std::process::Command;

    #[test]
    fn a_package_is_unpacked_without_what_it_depends_on() {
        let Some(packages) = Packages::or_skip("bookworm", &["hostname"], With::Nothing) else { return };
        assert!(
            packages.version("hostname").is_some_and(|version| version.starts_with("3.")),
            "{packages:?}"
        );
        assert!(packages.root().join("bin/hostname").is_file());
        assert!(packages.version("libc6").is_none());
    }

    #[test]
    fn another_suites_root_can_be_run_in() {
        let Some(packages) = Packages::or_skip("bullseye", &[ESSENTIAL], With::Dependencies) else { return };
        let mut command = Command::new("chroot");
        command.arg(packages.root()).args(["/bin/sh", "-c", ". /etc/os-release; echo $VERSION_ID"]);
        let output = command.output().expect("chroot runs");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "11\n", "{output:?}");
    }

    #[test]
    fn a_package_that_does_not_exist_is_named_in_the_error() {
        let Some(_) = Packages::or_skip("bookworm", &["hostname"], With::Nothing) else { return };
        let error = Packages::get("bookworm", &["no-such-package"], With::Nothing);
        assert!(format!("{:#}", error.expect_err("no package")).contains("no-such-package"));
    }
}
