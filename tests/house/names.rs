//! The names of types: each stands once, is a noun, and is the field's word.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::imports;

/// Names of types that say nothing about what the type is, with what to say instead. All were in the code once.
const NOT_NOUNS: [(&str, &str); 4] = [
    (
        "Asked Attached Attested Bound Carried Claimed Dated Displaced Drained Ended Explained Followed \
         Forgotten Former Freed Given Gone Got Guarded Heard Held Inherited Joined Kept Known Lasting \
         Lent Lingering Listed Loaded Made Meant Needed Noted Parked Published Received Refused Released \
         Removed Rendered Said Seen Served Shown Signed Skipped Spent Standing Started Stored Tagged \
         Taken Told Touched Traced Turned Unread Waiting Wanted Watched Wished Written",
        "a noun with this participle, such as `StoredMailbox`",
    ),
    (
        "Bell Board Deaf Errands Fate Glimpse Mint Mute Outlet Outlook Pen Reel Rig Room Scene Seat \
         Shelf Sheet Story Tab Talk Workshop",
        "what it is, not what it is like: `FrameWriter`, `MemoryBudget`",
    ),
    ("Arguments Kind Mode Options Reason State Status Type", "its domain in front, as in `NodeStatus`"),
    ("Octets Patience Question Trouble Troubles", "byte, timeout, request, problem"),
];

/// Exceptions of [`NOT_NOUNS`], each with its reason.
const FIELDS_WORDS: [(&str, &str); 1] =
    [("Fate", "the kernel's programs and the verdict table of the book use it")];

/// The crates whose items the agent's other crates can name.
fn crates() -> Vec<PathBuf> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let user = top.join("metadata-user");
    let below = std::fs::read_dir(&user).expect("a directory of crates");
    let below = below.map(|entry| entry.expect("an entry").path());
    below
        .chain([user, top.join("metadata-common")])
        .map(|path| path.join("src"))
        .filter(|src| src.is_dir())
        .collect()
}

/// Each type that is visible outside of its module, with the files that define one of its name.
fn types() -> BTreeMap<String, Vec<PathBuf>> {
    let mut types: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for (file, words) in crates().iter().flat_map(|src| imports::product(src)) {
        for three in words.windows(3) {
            let is_visible = three[0] == "pub" || three[0] == ")";
            let is_name = three[2].starts_with(|c: char| c.is_ascii_alphabetic());
            if is_visible && is_name && matches!(&*three[1], "struct" | "enum" | "trait" | "type" | "union") {
                types.entry(three[2].clone()).or_default().push(file.clone());
            }
        }
    }
    types
}

#[test]
fn a_name_of_a_type_stands_once_among_the_crates() {
    let types = types();
    assert!(types.len() > 600, "{} types", types.len());
    let twice: Vec<_> = types.into_iter().filter(|(_, files)| files.len() > 1).collect();
    assert!(twice.is_empty(), "one name, one type; put the domain in front: {twice:#?}");
}

#[test]
fn types_are_called_by_nouns_of_the_field() {
    let types = types();
    for (names, instead) in NOT_NOUNS {
        for name in names.split(' ').filter(|name| FIELDS_WORDS.iter().all(|(word, _)| word != name)) {
            let found = types.get(name);
            assert!(found.is_none(), "`{name}` in {found:?}: write {instead}");
        }
    }
}

#[test]
fn eight_bits_are_a_byte() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let directories = ["metadata-common/src", "metadata-ebpf/src", "docs/src"].map(|name| top.join(name));
    let mut found = Vec::new();
    for file in crates().into_iter().chain(directories).flat_map(|directory| files(&directory)) {
        let text = std::fs::read_to_string(&file).expect("text");
        for line in text.lines() {
            // Media types, ASN.1, the methods of the standard library's addresses, and quotations.
            let line = ["octet-stream", "OctetString", ".octets()", "::octets", "\u{201c}"]
                .iter()
                .fold(line.to_lowercase(), |line, word| line.replace(&word.to_lowercase(), ""));
            if line.contains("octet") {
                found.push(format!("{}: {line}", file.display()));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// Every source and page below a directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries =
        std::fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path());
    let all = entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] });
    all.filter(|path| path.extension().is_some_and(|ending| ending == "rs" || ending == "md")).collect()
}
