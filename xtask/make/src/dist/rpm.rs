//! Makes the RPM package from the Debian package: the same files, less those that only Debian has.

use anyhow::{Context as _, Result, ensure};
use rpm::{BuildConfig, CompressionWithLevel, Dependency, FileOptions, Package, PackageBuilder};
use shell::architecture::Architecture;
use shell::tools;
use shell::tools::Tool;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::VERSION;
use crate::deb::{self, Scripts};
use crate::image::layout::About;

/// Counts packages of one version.
const RELEASE: &str = "1";
const SUMMARY: &str = "Instance metadata service of a hypervisor node";
const DESCRIPTION: &str = "\
One agent per node answers the metadata addresses of clouds (169.254.169.254 and its like) for every VM on it, in the
dialects that cloud-init and others speak. An XDP program on each VM's tap steers those packets to the agent.";

/// Directories of the package, with their modes. Records contain secrets.
const DIRECTORIES: [(&str, u16); 9] = [
    ("/etc/xdp-imds", 0o700),
    ("/etc/xdp-imds/libvirt", 0o755),
    ("/etc/xdp-imds/records.d", 0o755),
    ("/usr/share/doc/xdp-imds", 0o755),
    ("/usr/share/doc/xdp-imds/examples", 0o755),
    ("/usr/share/doc/xdp-imds/operate", 0o755),
    ("/usr/share/doc/xdp-imds/reference", 0o755),
    ("/usr/share/licenses/xdp-imds", 0o755),
    ("/usr/share/xdp-imds", 0o755),
];

/// Begins the paths of files that only Debian has.
const DEBIAN: [&str; 3] = [
    "/usr/share/doc/xdp-imds/changelog.Debian.gz",
    "/usr/share/doc/xdp-imds/copyright",
    "/usr/share/lintian/",
];

/// Begins the paths of completions for zsh, on Debian and elsewhere.
const ZSH: [&str; 2] = ["/usr/share/zsh/vendor-completions/", "/usr/share/zsh/site-functions/"];

/// A file of a package.
struct File {
    /// The absolute path.
    path: String,
    mode: u16,
    bytes: Vec<u8>,
}

/// Writes the package with the files of a Debian package to `out`. `top` is the source tree.
pub(super) fn make_rpm(
    package: &Path,
    architecture: Architecture,
    about: &About,
    top: &Path,
    out: &Path,
) -> Result<()> {
    let mut tar = Command::new("dpkg-deb");
    let output = tar.arg("--fsys-tarfile").arg(package).output().context("cannot run dpkg-deb")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "dpkg-deb: {}: {}", output.status, errors.trim());
    let mut files = files(&output.stdout)?;
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        let bytes = fs::read(top.join(name)).with_context(|| format!("cannot read {name}"))?;
        files.push(File { path: format!("/usr/share/licenses/xdp-imds/{name}"), mode: 0o644, bytes });
    }
    let script = |name: &str| {
        let path = top.join("deploy/rpm/scripts").join(name);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let scripts = [script("post")?, script("preun")?, script("postun")?];
    let made = build(files, scripts, architecture, about)?;
    let path = out.join(format!("xdp-imds-{VERSION}-{RELEASE}.{}.rpm", architecture.name()));
    made.write_file(&path).with_context(|| format!("cannot write {}", path.display()))
}

/// Returns the files of a Debian package that the RPM package also has, with the paths that they have there.
fn files(tar: &[u8]) -> Result<Vec<File>> {
    let mut files = Vec::new();
    for entry in tar::Archive::new(tar).entries()? {
        let mut entry = entry?;
        if entry.header().entry_type().is_dir() {
            continue;
        }
        let mut path = format!("/{}", entry.path()?.to_string_lossy().trim_start_matches("./"));
        ensure!(entry.header().entry_type().is_file(), "expected only files and directories, found {path}");
        if DEBIAN.iter().any(|start| path.starts_with(start)) {
            continue;
        }
        if let Some(name) = path.strip_prefix(ZSH[0]) {
            path = format!("{}{name}", ZSH[1]);
        }
        let mode = u16::try_from(entry.header().mode()? & 0o7777)?;
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes)?;
        files.push(File { path, mode, bytes });
    }
    Ok(files)
}

fn build(
    files: Vec<File>,
    [post, preun, postun]: [String; 3],
    architecture: Architecture,
    about: &About,
) -> Result<Package> {
    let epoch = u32::try_from(about.epoch()).context("the source is too new for an RPM package")?;
    let mut builder =
        PackageBuilder::new("xdp-imds", VERSION, "MIT OR Apache-2.0", architecture.name(), SUMMARY);
    // Every version of RPM that is still maintained reads gzip.
    let config = BuildConfig::v4().compression(CompressionWithLevel::Gzip(9)).source_date(epoch);
    builder.using_config(config).release(RELEASE).description(DESCRIPTION);
    builder.url("https://github.com/xdp-imds/xdp-imds").build_host("localhost");
    builder.post_install_script(post).pre_uninstall_script(preun).post_uninstall_script(postun);
    // The unit reloads by kill.
    builder.requires(Dependency::any("/usr/bin/kill")).requires(Dependency::any("systemd"));
    builder.suggests(Dependency::any("libvirt-daemon"));
    for (path, mode) in DIRECTORIES {
        builder.with_dir_entry(FileOptions::dir(path).permissions(mode))?;
    }
    for File { path, mode, bytes } in files {
        let options = FileOptions::new(&path).permissions(mode);
        let options = match () {
            // An upgrade keeps a changed file.
            () if path.starts_with("/etc/") => options.config().noreplace(),
            () if path.starts_with("/usr/share/licenses/") => options.license(),
            () if path.starts_with("/usr/share/doc/") || path.starts_with("/usr/share/man/") => options.doc(),
            () => options,
        };
        builder.with_file_contents(bytes, options)?;
    }
    Ok(builder.build()?)
}

// Repositories of APT and DNF, made of the packages of a release by `deploy/repositories/make.sh`, and their trial: the
// repositories are signed with a key made for it, and the package managers install from them as users would.

/// The directory of the repositories in that of a release. It is no file of the release: other releases' packages
/// belong in it too.
pub(super) const NAME: &str = "xdp-imds-repositories";

/// The programs that make the repositories, and their Debian packages.
const TOOLS: &[Tool] = &[("apt-ftparchive", "apt-utils"), ("createrepo_c", "createrepo-c")];
/// The programs that the trial needs besides.
const TRIAL_TOOLS: &[Tool] = &[("gpg", "gnupg"), ("rpmsign", "rpm"), ("dnf", "dnf")];

/// The user of the trial's key.
const USER: &str = "trial@xdp-imds.invalid";

/// Installs from the repository `$1`, an archive, as the book says; but for the place of the repository.
const APT: &str = r#"
    mkdir -p /etc/apt/keyrings /srv/repository /tmp/sources
    tar -xf "/tmp/$1" -C /srv/repository
    install -m 0644 /srv/repository/apt/xdp-imds.asc /etc/apt/keyrings/xdp-imds.asc
    sed 's|https://[^ ]*/apt|file:/srv/repository/apt|' /srv/repository/apt/xdp-imds.sources \
        > /tmp/sources/xdp-imds.sources
    # No other source: there is no network here.
    only='-o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=/tmp/sources'
    apt-get $only update -q
    apt-get $only install -y -q xdp-imds
    xdp-imds --version
    apt-cache $only policy xdp-imds | grep -q 'file:/srv/repository/apt stable/main'
    apt-get $only purge -y -q xdp-imds
    # What somebody has changed is refused.
    sed -i 's/^Version: .*/Version: 9/' /srv/repository/apt/dists/stable/main/binary-*/Packages
    rm /srv/repository/apt/dists/stable/main/binary-*/Packages.gz
    rm -rf /var/lib/apt/lists/*
    if apt-get $only update -q -o APT::Update::Error-Mode=any; then echo 'a changed index is accepted'; exit 1; fi
"#;

/// Installs from the repository `$2`, an archive, into the system `$1`. `$3` is a package with what a Fedora would have
/// already.
const DNF: &str = r#"
    place="$1/srv/repository"
    mkdir -p "$place" "$1/tmp/base" "$1/tmp/repos"
    tar -xf "$1/tmp/$2" -C "$place"
    cp "$1/tmp/$3" "$1/tmp/base"
    createrepo_c --quiet "$1/tmp/base"
    sed "s|https://[^ ]*/rpm|file://$place/rpm|" "$place/rpm/xdp-imds.repo" > "$1/tmp/repos/xdp-imds.repo"
    run() {
        dnf --quiet --assumeyes --installroot="$1" --releasever=1 --setopt=reposdir="$1/tmp/repos" \
            --setopt=cachedir="$1/tmp/cache" --repofrompath="base,file://$1/tmp/base" --setopt=base.gpgcheck=0 "$2" xdp-imds
    }
    run "$1" install
    chroot "$1" xdp-imds --version
    rpm --root "$1" --verify xdp-imds
    run "$1" remove
    test ! -e "$1/usr/bin/xdp-imds"
    # What somebody has changed is refused.
    echo >> "$place/rpm/repodata/repomd.xml"
    rm -rf "$1/tmp/cache"
    if run "$1" install; then echo 'a changed index is accepted'; exit 1; fi
"#;

/// Makes the repositories of the packages in `packages`, signed with the key of a user, if there is one.
pub(super) fn make_repositories(
    top: &Path,
    packages: &Path,
    out: &Path,
    key: Option<(&str, &Path)>,
) -> Result<()> {
    tools::ensure(TOOLS)?;
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let mut command = Command::new(top.join("deploy/repositories/make.sh"));
    command.arg(packages).arg(out);
    if let Some((user, home)) = key {
        command.arg(user).env("GNUPGHOME", home);
    }
    shell::run(&mut command)
}

/// Signs the packages and repositories of a release, and installs from them on copies of these systems.
pub(super) fn run(out: &Path, systems: &[PathBuf], here: Architecture) -> Result<()> {
    tools::ensure(TRIAL_TOOLS)?;
    let room = tempfile::tempdir()?;
    let (home, packages, made) =
        (room.path().join("gpg"), room.path().join("packages"), room.path().join("made"));
    for place in [&home, &packages, &made] {
        fs::create_dir(place)?;
    }
    fs::set_permissions(&home, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
    for entry in fs::read_dir(out)? {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "deb" || kind == "rpm") {
            fs::copy(&path, packages.join(path.file_name().context("a file has a name")?))?;
        }
    }
    let gpg = |words: &[&str]| -> Result<String> {
        let mut command = Command::new("gpg");
        command.args(["--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]);
        deb::printed(command.args(words).env("GNUPGHOME", &home))
    };
    gpg(&["--quick-generate-key", USER, "rsa3072", "sign", "1d"])?;
    let name = format!("_gpg_name {USER}");
    let mut sign = Command::new("rpmsign");
    // Debian 12 names gpg2 there, which no package of it has.
    sign.args(["--addsign", "--define", &name, "--define", "__gpg /usr/bin/gpg"]).env("GNUPGHOME", &home);
    for entry in fs::read_dir(&packages)? {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "rpm") {
            sign.arg(path);
        }
    }
    shell::run(&mut sign)?;
    make_repositories(shell::top(), &packages, &made, Some((USER, &home)))?;
    gpg_agent_ends(&home);
    let archive = room.path().join("repositories.tar");
    deb::printed(Command::new("tar").arg("-C").arg(&made).arg("-cf").arg(&archive).args(["apt", "rpm"]))?;

    for system in systems {
        deb::run_on_overlay(system, &[&archive], &Scripts { outside: "", inside: APT })
            .with_context(|| format!("APT does not install from the repository on {}", system.display()))?;
        println!("dist: {}: apt-get installed from the signed repository", system.display());
    }
    let base = base(room.path(), here)?;
    let system = systems.first().context("there is a system")?;
    deb::run_on_overlay(system, &[&archive, &base], &Scripts { outside: DNF, inside: "" })
        .context("DNF does not install from the repository")?;
    println!("dist: dnf installed version {VERSION} from the signed repository, into a system of Debian");
    Ok(())
}

/// Ends the key's agent, which gpg has started. It would end by itself when its directory is gone.
fn gpg_agent_ends(home: &Path) {
    let ended = Command::new("gpgconf").args(["--kill", "gpg-agent"]).env("GNUPGHOME", home).status();
    if let Err(error) = ended {
        eprintln!("dist: cannot end the agent of gpg: {error}");
    }
}

/// Writes a package that provides what ours depends on, as a Debian system has no RPM packages.
fn base(room: &Path, here: Architecture) -> Result<PathBuf> {
    let config = BuildConfig::v4().source_date(0);
    let mut builder = PackageBuilder::new("base", "1", "MIT", here.name(), "Stands for a base system");
    builder.using_config(config).release("1");
    for name in ["/bin/sh", "/usr/bin/kill", "systemd"] {
        builder.provides(Dependency::any(name));
    }
    builder.with_dir_entry(FileOptions::dir("/usr/share/base").permissions(0o755))?;
    let path = room.join("base.rpm");
    builder.build()?.write_file(&path)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use rpm::{FileFlags, Package};
    use shell::architecture::Architecture;
    use std::collections::BTreeMap;
    use std::fs;
    use std::process::Command;

    use super::{DIRECTORIES, build, files};
    use crate::image::layout::{About, LayerEntry};

    /// Runs the script `$3` on the packages in `$4`. In the place of its programs, in `$2`, are some that do nothing;
    /// `$1` names one that fails. The shell writes them: a program that this process has open cannot be run (ETXTBSY).
    const WITH_STAND_INS: &str = r#"
        for tool in apt-ftparchive createrepo_c; do
            printf '#!/bin/sh\n[ %s != %s ]\n' "$tool" "$1" > "$2/$tool"
            chmod 0755 "$2/$tool"
        done
        PATH="$2:$PATH" exec "$3" "$4" "$5"
    "#;

    #[test]
    fn repositories_that_cannot_be_made_leave_those_of_before() {
        let script = shell::top().join("deploy/repositories/make.sh");
        for (packages, fails, expected) in [
            (&[][..], "none", Some("expected .deb files")),
            (&["a.rpm"], "none", Some("expected .deb files")),
            (&["a.deb"], "none", Some("expected .rpm files")),
            (&["a.deb", "a.rpm"], "apt-ftparchive", Some("")),
            (&["a.deb", "a.rpm"], "createrepo_c", Some("")),
            (&["a.deb", "a.rpm"], "none", None),
        ] {
            let room = tempfile::tempdir().expect("a directory");
            let [bin, given, out] = ["bin", "packages", "out"].map(|name| room.path().join(name));
            for directory in [&bin, &given, &out.join("apt"), &out.join("rpm")] {
                fs::create_dir_all(directory).expect("a directory");
            }
            for file in packages.iter().map(|name| given.join(name)).chain([out.join("apt/before")]) {
                fs::write(file, "").expect("written");
            }
            let mut command = Command::new("sh");
            command.args(["-c", WITH_STAND_INS, "sh", fails]).args([&bin, &script, &given, &out]);
            let output = command.output().expect("a shell");
            let said = String::from_utf8_lossy(&output.stderr);
            let what = format!("{packages:?}, {fails}: {said}");
            assert_eq!(output.status.success(), expected.is_none(), "{what}");
            assert!(said.contains(expected.unwrap_or_default()), "{what}");
            assert_eq!(out.join("apt/before").exists(), expected.is_some(), "{what}");
            assert_eq!(out.join("apt/pool/a.deb").exists(), expected.is_none(), "{what}");
            assert_eq!(fs::read_dir(&out).expect("a directory").count(), 2, "{what}");
        }
    }

    /// Makes a package with some files of the Debian package, at some time.
    fn package() -> Package {
        let paths = [
            "etc/xdp-imds/config.yaml",
            "usr/lib/systemd/system/xdp-imds.service",
            "usr/share/doc/xdp-imds/NEWS.md",
            "usr/share/doc/xdp-imds/changelog.Debian.gz",
            "usr/share/doc/xdp-imds/copyright",
            "usr/share/lintian/overrides/xdp-imds",
            "usr/share/zsh/vendor-completions/_xdp-imds",
        ];
        let mut entries: Vec<_> = paths.map(|path| LayerEntry::file(path, path.into())).into();
        entries.push(LayerEntry::program("usr/bin/xdp-imds", vec![0x7f]));
        let tar = crate::image::layout::write_layer(entries, 5).expect("a tar").tar;
        let scripts = ["a", "b", "c"].map(str::to_owned);
        build(files(&tar).expect("files"), scripts, Architecture::Arm, &About::at(5)).expect("a package")
    }

    #[test]
    fn the_files_are_those_of_the_debian_package_in_the_places_of_rpm() {
        let package = package();
        let found = package.metadata.get_file_entries().expect("entries");
        let mut found: BTreeMap<String, (u16, FileFlags)> = found
            .into_iter()
            .map(|entry| {
                (entry.path().to_string_lossy().into_owned(), (entry.mode().permissions(), entry.flags()))
            })
            .collect();
        for (path, mode) in DIRECTORIES {
            assert_eq!(found.remove(path).map(|(mode, _)| mode), Some(mode), "{path}");
        }
        let expected = [
            ("/etc/xdp-imds/config.yaml", (0o644, FileFlags::CONFIG | FileFlags::NOREPLACE)),
            ("/usr/bin/xdp-imds", (0o755, FileFlags::empty())),
            ("/usr/lib/systemd/system/xdp-imds.service", (0o644, FileFlags::empty())),
            ("/usr/share/doc/xdp-imds/NEWS.md", (0o644, FileFlags::DOC)),
            ("/usr/share/zsh/site-functions/_xdp-imds", (0o644, FileFlags::empty())),
        ];
        let expected = expected.map(|(path, facts)| (path.to_owned(), facts)).into();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_package_is_the_same_whenever_it_is_made() {
        let written = || {
            let mut bytes = Vec::new();
            package().write(&mut bytes).expect("written");
            bytes
        };
        assert_eq!(written(), written());
        assert_eq!(package().metadata.get_build_time().expect("a time"), 5);
    }
}
