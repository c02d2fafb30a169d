//! Repositories of APT and DNF, made of the packages of a release by `deploy/repositories/make.sh`, and their trial: the
//! repositories are signed with a key made for it, and the package managers install from them as users would.

use super::VERSION;
use crate::deb;
use crate::overlay::{self, Scripts};
use anyhow::{Context as _, Result};
use rpm::{BuildConfig, Dependency, FileOptions, PackageBuilder};
use shell::architecture::Architecture;
use shell::tools::{self, Tool};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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
pub(super) fn make(top: &Path, packages: &Path, out: &Path, key: Option<(&str, &Path)>) -> Result<()> {
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
    make(shell::top(), &packages, &made, Some((USER, &home)))?;
    gpg_agent_ends(&home);
    let archive = room.path().join("repositories.tar");
    deb::printed(Command::new("tar").arg("-C").arg(&made).arg("-cf").arg(&archive).args(["apt", "rpm"]))?;

    for system in systems {
        overlay::run(system, &[&archive], &Scripts { outside: "", inside: APT })
            .with_context(|| format!("APT does not install from the repository on {}", system.display()))?;
        println!("dist: {}: apt-get installed from the signed repository", system.display());
    }
    let base = base(room.path(), here)?;
    let system = systems.first().context("there is a system")?;
    overlay::run(system, &[&archive, &base], &Scripts { outside: DNF, inside: "" })
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
