//! Makes the RPM package from the Debian package: the same files, less those that only Debian has.

use super::VERSION;
use crate::image::layout::About;
use anyhow::{Context as _, Result, ensure};
use rpm::{BuildConfig, CompressionWithLevel, Dependency, FileOptions, Package, PackageBuilder};
use shell::architecture::Architecture;
use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::process::Command;

/// Counts packages of one version.
const RELEASE: &str = "1";
const SUMMARY: &str = "Instance metadata service of a hypervisor node";
const DESCRIPTION: &str = "\
One agent per node answers the metadata addresses of clouds (169.254.169.254 and its like) for every VM on it, in the
dialects that cloud-init and others speak. An XDP program on each VM's tap steers those packets to the agent.";

/// Directories of the package, with their modes. Records contain secrets.
const DIRECTORIES: [(&str, u16); 6] = [
    ("/etc/xdp-imds", 0o700),
    ("/etc/xdp-imds/libvirt", 0o755),
    ("/etc/xdp-imds/records.d", 0o755),
    ("/usr/share/doc/xdp-imds", 0o755),
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
pub(super) fn make(
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

#[cfg(test)]
mod tests {
    use super::{DIRECTORIES, build, files};
    use crate::image::layer::{self, Entry};
    use crate::image::layout::About;
    use rpm::{FileFlags, Package};
    use shell::architecture::Architecture;
    use std::collections::BTreeMap;

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
        let mut entries: Vec<_> = paths.map(|path| Entry::file(path, path.into())).into();
        entries.push(Entry::program("usr/bin/xdp-imds", vec![0x7f]));
        let tar = layer::write(entries, 5).expect("a tar").tar;
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
