//! The documents of packages: the pages for operators, with links that lead to what is installed.

use anyhow::{Context as _, Result};
use flate2::{Compression, GzBuilder};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::book::plain;

/// Documents outside the book, and their paths in the package's directory of documents.
const DOCUMENTS: [(&str, &str); 4] = [
    ("README.md", "README.md"),
    ("SECURITY.md", "SECURITY.md"),
    ("CHANGELOG.md", "NEWS.md"),
    ("deploy/libvirt/README.md", "libvirt.md"),
];
/// Directories of the book whose pages are documents of the package.
const CHAPTERS: [(&str, &str); 2] = [("docs/src/operate", "operate"), ("docs/src/reference", "reference")];
/// Other files that the package has.
const FILES: [(&str, &str); 7] = [
    ("deploy/libvirt/domain.xml", "/usr/share/doc/xdp-imds/examples/domain.xml"),
    ("deploy/libvirt/xdp-imds", "/etc/libvirt/hooks/qemu.d/xdp-imds"),
    ("deploy/helm/xdp-imds/files/alerts.yaml", "/usr/share/xdp-imds/alerts.yaml"),
    ("deploy/helm/xdp-imds/files/xdp-imds.json", "/usr/share/xdp-imds/dashboard.json"),
    ("deploy/proxmox/xdp-imds", "/usr/share/xdp-imds/proxmox-hookscript"),
    ("deploy/network/NetworkManager.conf", "/usr/lib/NetworkManager/conf.d/90-xdp-imds.conf"),
    ("deploy/network/systemd-networkd.network", "/usr/lib/systemd/network/10-xdp-imds.network"),
];
/// Where everything else is.
const REPOSITORY: &str = "https://github.com/xdp-imds/xdp-imds/";

/// Writes the documents of the source tree `top` to a new directory.
pub(super) fn write_documents(top: &Path, directory: &Path) -> Result<()> {
    let mut documents: BTreeMap<PathBuf, String> =
        DOCUMENTS.map(|(path, installed)| (path.into(), installed.to_owned())).into();
    for (chapter, installed) in CHAPTERS {
        let pages = fs::read_dir(top.join(chapter)).with_context(|| format!("cannot list {chapter}"))?;
        for page in pages {
            let name = page?.file_name().into_string().ok().context("expected a name in UTF-8")?;
            documents.insert(Path::new(chapter).join(&name), format!("{installed}/{name}"));
        }
        fs::create_dir_all(directory.join(installed))?;
    }
    for (path, installed) in &documents {
        let text =
            fs::read_to_string(top.join(path)).with_context(|| format!("cannot read {}", path.display()))?;
        let text = match path.extension().is_some_and(|extension| extension == "md") {
            true => linked(top, path, &text, &documents),
            false => text,
        };
        fs::write(directory.join(installed), text).with_context(|| format!("cannot write {installed}"))?;
    }
    Ok(())
}

/// The text of a document with the links that it has where it is installed. Links in code stay as they are.
fn linked(top: &Path, document: &Path, text: &str, documents: &BTreeMap<PathBuf, String>) -> String {
    let mut linked = String::with_capacity(text.len());
    let mut is_code = false;
    for line in text.split_inclusive('\n') {
        is_code ^= line.trim_start().starts_with("```");
        let mut rest = line;
        let mut ticks = 0;
        while let Some((before, after)) = rest.split_once("](").filter(|_| !is_code) {
            ticks += before.matches('`').count();
            linked.push_str(before);
            linked.push_str("](");
            rest = after;
            if let Some((target, after)) = after.split_once(')').filter(|_| ticks % 2 == 0) {
                linked.push_str(&installed(top, document, target, documents));
                linked.push(')');
                rest = after;
            }
        }
        linked.push_str(rest);
    }
    linked
}

/// The target of a link of a document, as it is installed.
fn installed(top: &Path, document: &Path, target: &str, documents: &BTreeMap<PathBuf, String>) -> String {
    let (place, anchor) = target.split_at(target.find('#').unwrap_or(target.len()));
    let inside = place.strip_prefix(REPOSITORY).and_then(|rest| rest.split_once("/main/"));
    let path = match inside {
        Some((_, path)) => PathBuf::from(path),
        None if place.is_empty() || place.contains("://") || place.starts_with("mailto:") => {
            return target.into();
        }
        None => plain(&document.parent().unwrap_or(Path::new("")).join(place)),
    };
    if let Some(other) = documents.get(&path) {
        let depth = documents.get(document).map_or(0, |own| own.matches('/').count());
        return format!("{}{other}{anchor}", "../".repeat(depth));
    }
    if let Some((_, other)) = FILES.iter().find(|(source, _)| path == Path::new(source)) {
        return (*other).to_owned();
    }
    let kind = if top.join(&path).is_dir() { "tree" } else { "blob" };
    format!("{REPOSITORY}{kind}/main/{}{anchor}", path.display())
}

// Manual pages and completions for packages, which the agent itself writes, and the documents beside them.

/// Lets an agent write its pages to the directory `pages` below `products`, and returns that directory. Manual pages
/// are compressed, as distributions require. The documents are in `doc` below it.
pub(crate) fn write(agent: &Path, products: &Path) -> Result<PathBuf> {
    let pages = products.join("pages");
    if pages.is_dir() {
        // A verb may have another name now.
        fs::remove_dir_all(&pages).with_context(|| format!("cannot remove {}", pages.display()))?;
    }
    shell::run(Command::new(agent).arg("pages").arg(&pages).env_remove("XDP_IMDS_LOG"))?;
    let manual = pages.join("man1");
    for file in fs::read_dir(&manual).with_context(|| format!("cannot list {}", manual.display()))? {
        compress(&file?.path())?;
    }
    write_documents(shell::top(), &pages.join("doc"))?;
    Ok(pages)
}

/// Replaces a file by its compressed form, whose bytes depend on the content alone.
fn compress(path: &Path) -> Result<()> {
    let bytes = fs::read(path)?;
    let mut gzip = GzBuilder::new().mtime(0).write(Vec::new(), Compression::best());
    gzip.write_all(&bytes)?;
    let name = format!("{}.gz", path.display());
    fs::write(&name, gzip.finish()?).with_context(|| format!("cannot write {name}"))?;
    Ok(fs::remove_file(path)?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::io::Read as _;
    use std::path::Path;

    use super::{FILES, REPOSITORY, compress, linked, write_documents};

    #[test]
    fn links_lead_to_what_is_installed_or_to_the_repository() {
        let documents = BTreeMap::from([
            ("README.md".into(), "README.md".to_owned()),
            ("docs/src/operate/top.md".into(), "operate/top.md".to_owned()),
            ("docs/src/reference/limits.md".into(), "reference/limits.md".to_owned()),
        ]);
        let github = |path: &str| format!("[a]({REPOSITORY}{path})");
        for (document, text, expected) in [
            ("README.md", "[a](docs/src/operate/top.md#x)".into(), "[a](operate/top.md#x)".to_owned()),
            (
                "docs/src/operate/top.md",
                "[a](../reference/limits.md)".into(),
                "[a](../reference/limits.md)".into(),
            ),
            ("docs/src/operate/top.md", github("blob/main/README.md"), "[a](../README.md)".into()),
            (
                "docs/src/operate/top.md",
                "[a](#here) [`b`](top.md)".into(),
                "[a](#here) [`b`](../operate/top.md)".into(),
            ),
            (
                "README.md",
                "[a](docs/src/design/keys.md#x)".into(),
                github("blob/main/docs/src/design/keys.md#x"),
            ),
            ("README.md", "[a](deploy/recipes)".into(), github("tree/main/deploy/recipes")),
            ("README.md", "[a](deploy/libvirt/domain.xml)".into(), format!("[a]({})", FILES[0].1)),
            ("README.md", "[a](https://example.com/docs/x) [b](mailto:x)".into(), String::new()),
            ("README.md", "`[a](docs/src/operate/top.md)`".into(), String::new()),
            ("README.md", "```\n[a](docs/src/operate/top.md)\n```\n".into(), String::new()),
        ] {
            let text: String = text;
            let expected = if expected.is_empty() { &text } else { &expected };
            assert_eq!(&linked(shell::top(), Path::new(document), &text, &documents), expected, "{document}");
        }
    }

    #[test]
    fn no_relative_link_of_the_packages_documents_is_broken() {
        let room = tempfile::tempdir().expect("a directory");
        write_documents(shell::top(), room.path()).expect("written");
        let mut count = 0;
        for directory in ["", "operate", "reference"] {
            for page in fs::read_dir(room.path().join(directory)).expect("a directory") {
                let page = page.expect("an entry").path();
                if page.extension().is_none_or(|extension| extension != "md") {
                    continue;
                }
                let mut is_code = false;
                for line in fs::read_to_string(&page).expect("text").lines() {
                    is_code ^= line.trim_start().starts_with("```");
                    for target in line.split("](").skip(1).filter(|_| !is_code) {
                        let place = target.split([')', '#']).next().unwrap_or_default();
                        let is_elsewhere = place.is_empty() || place.contains(':') || place.starts_with('/');
                        let path = page.parent().expect("a directory").join(place);
                        assert!(is_elsewhere || path.exists(), "{}: {place}", page.display());
                        count += usize::from(!is_elsewhere);
                    }
                }
            }
        }
        assert!(count > 50, "{count} links are few");
    }

    #[test]
    fn a_compressed_page_takes_the_place_of_the_page() {
        let room = tempfile::tempdir().expect("a directory");
        let page = room.path().join("a.1");
        fs::write(&page, "text").expect("written");
        compress(&page).expect("compressed");
        assert!(!page.exists());
        let bytes = fs::read(room.path().join("a.1.gz")).expect("a file");
        // RFC 1952 §2.3: no name, no time, slowest and best compression.
        assert_eq!(bytes[3..9], [0, 0, 0, 0, 0, 2]);
        let mut text = String::new();
        flate2::read::GzDecoder::new(&*bytes).read_to_string(&mut text).expect("gzip");
        assert_eq!(text, "text");
    }
}
