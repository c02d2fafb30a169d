//! The manifests keep the dependency rules, which state for each crate the crates that it may depend on and the
//! packages that it must not link. Names of types follow the rules of the house.
//!
//! The table of crates in the book states the rules. `cargo metadata` lists the dependencies in each manifest, and
//! `cargo tree` all packages that a crate links if built alone without default features. Neither uses the network.

#[path = "house/imports.rs"]
mod imports;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The page with the table.
const PAGE: &str = include_str!("../docs/src/design/architecture.md");
/// Names in the table that stand for several packages.
const FAMILIES: [(&str, &[&str]); 2] =
    [("aya", &["aya", "aya-obj", "aya-log"]), ("kube", &["kube", "k8s-openapi"])];
/// The one place that parses YAML and JSON that others wrote, under a budget.
const PARSER: &str = "content/src/parser.rs";
/// Other places that parse JSON or XML, and why their input is no tenant's, or is bounded there.
const OTHER_PARSERS: [(&str, &str); 20] = [
    (
        "content/src/dialect/document.rs",
        "documents that the agent rendered itself; long strings are not in them",
    ),
    ("content/src/token.rs", "the key file in the agent's own directory"),
    ("control/src/instances.rs", "answers of the agent, read by its verbs"),
    ("control/src/status.rs", "answers of the agent, read by its verbs"),
    ("control/src/top.rs", "answers of the agent, read by its verbs"),
    ("feed/src/libvirt/domain.rs", "XML within XML_BYTES and XML_NODES, without document types"),
    ("feed/src/libvirt/hook.rs", "the record that the hook wrote itself"),
    (
        "feed/src/snapshot.rs",
        "the agent's own file, with a digest; each record in it goes through the parser",
    ),
    ("signer/src/documents.rs", "a document of the agent, at most a packet long"),
    ("signer/src/wire.rs", "the agent's packets to its signer, with a limit of bytes"),
    ("src/agent/handover/wire.rs", "lines of the agent that takes over, with a limit of bytes"),
    ("src/agent/registration_store.rs", "the agent's own files; the record in them goes through the parser"),
    ("src/verbs/doctor/gather.rs", "the agent's status, read by its verb"),
    ("src/verbs/trace.rs", "lines of the agent, read by its verbs"),
    ("src/verbs/options.rs", "answers of the agent, read by its verbs"),
    ("feed/src/state/asked_dialects.rs", "the agent's own file, with a limit of bytes for each line"),
    ("feed/src/state/learned_requests.rs", "the agent's own file, with a limit of bytes"),
    ("feed/src/state/vm_events.rs", "the agent's own file, with a limit of bytes"),
    ("feed/src/state.rs", "the agent's own files, with a limit of bytes for each line"),
    ("feed/src/state/mailboxes.rs", "the agent's own file, with a limit of bytes"),
];

/// The crate of the eBPF programs. It is not in the workspace, because it has another target.
const KERNEL: &str = "metadata-ebpf";

/// A row of the table, with package names instead of directories.
struct Room {
    name: String,
    depends_on: BTreeSet<String>,
    never_on: BTreeSet<String>,
}

/// The words of a cell in backticks.
fn spans(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

fn rooms() -> Vec<Room> {
    let rows = PAGE.lines().filter(|line| line.starts_with("| `"));
    let rows = rows.map(|line| line.trim_matches('|').split('|').collect::<Vec<_>>());
    let rows: Vec<_> = rows.filter(|cells| cells.len() == 4).collect();
    let rooms = rows.iter().map(|cells| Room {
        name: spans(cells[0]).map(package).collect(),
        depends_on: spans(cells[1]).map(package).collect(),
        never_on: spans(cells[2]).flat_map(members).map(str::to_owned).collect(),
    });
    rooms.collect()
}

/// The package of a crate, which the table names by its directory.
fn package(directory: &str) -> String {
    match directory {
        own if own.starts_with("metadata-") => own.to_owned(),
        short => format!("metadata-{short}"),
    }
}

fn members(name: &str) -> Vec<&str> {
    FAMILIES.iter().find(|(family, _)| *family == name).map_or_else(|| vec![name], |(_, all)| all.to_vec())
}

fn cargo(words: &[&str]) -> String {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let output =
        Command::new(cargo).args(words).arg("--offline").current_dir(top).output().expect("cargo runs");
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// The dependencies in the manifest of each package, without those of tests and build scripts.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let words = ["metadata", "--no-deps", "--format-version", "1"];
    let kernel = format!("{KERNEL}/Cargo.toml");
    let texts = [cargo(&words), cargo(&[&words[..], &["--manifest-path", &kernel]].concat())];
    let documents = texts.map(|text| serde_json::from_str::<Value>(&text).expect("JSON"));
    let packages = documents.iter().flat_map(|document| document["packages"].as_array().expect("packages"));
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let of = |package: &Value| -> BTreeSet<String> {
        let all = package["dependencies"].as_array().expect("dependencies").iter();
        all.filter(|one| one["kind"].is_null()).map(|one| text(&one["name"])).collect()
    };
    packages.map(|package| (text(&package["name"]), of(package))).collect()
}

/// All packages that a crate links without its default features.
fn linked(package: &str) -> BTreeSet<String> {
    let form = ["--prefix", "none", "--format", "{p}", "--no-default-features"];
    let text = cargo(&[&["tree", "--edges", "normal", "--package", package], &form[..]].concat());
    text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

#[test]
fn each_crate_depends_on_the_crates_of_its_row_and_no_others() {
    let (rooms, direct) = (rooms(), dependencies());
    let crates: BTreeSet<_> = rooms.iter().map(|room| room.name.clone()).collect();
    for Room { name, depends_on, .. } in &rooms {
        let found: BTreeSet<_> = direct[name].intersection(&crates).cloned().collect();
        assert_eq!(found, *depends_on, "{name}: left, its manifest; right, its row");
    }
}

#[test]
fn the_picture_shows_each_crate_above_those_it_depends_on() {
    let picture = PAGE.split("```text,diagram").nth(1).and_then(|rest| rest.split("```").next());
    let picture = picture.expect("a picture").lines().filter(|line| line.starts_with('│'));
    let first_words = |line: &'static str| line.split('│').filter_map(|cell| cell.split_whitespace().next());
    let lines =
        picture.enumerate().flat_map(|(at, line)| first_words(line).map(move |name| (package(name), at)));
    let lines: BTreeMap<_, _> = lines.collect();
    let rooms = rooms();
    assert_eq!(lines.len(), rooms.len(), "{lines:?}");
    for Room { name, depends_on, .. } in &rooms {
        let above: Vec<_> = depends_on.iter().filter(|one| lines[*one] <= lines[name]).collect();
        assert!(above.is_empty(), "{name} is not shown above {above:?}");
    }
}

#[test]
fn the_map_of_the_code_names_files_that_exist() {
    let (_, map) = PAGE.split_once("## Where to start reading").expect("the map");
    let (map, _) = map.split_once("\n## ").expect("the end of the map");
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let paths: Vec<_> = spans(map).filter(|span| span.ends_with(".rs") || span.ends_with("src/")).collect();
    assert!(paths.len() > 10, "{paths:?}");
    for path in paths {
        let directory = if path.starts_with("metadata-") { top.clone() } else { top.join("metadata-user") };
        assert!(directory.join(path).exists(), "{path}");
    }
}

#[test]
fn every_crate_of_the_agent_has_a_row() {
    let rows: BTreeSet<_> = rooms().into_iter().map(|room| room.name).collect();
    let ours = |name: &String| name.starts_with("metadata-");
    let crates: BTreeSet<_> = dependencies().into_keys().filter(ours).collect();
    assert_eq!(crates, rows);
}

#[test]
fn no_crate_links_a_package_that_its_row_forbids() {
    let direct = dependencies();
    for Room { name, never_on, .. } in rooms() {
        let linked = if name == KERNEL { direct[KERNEL].clone() } else { linked(&name) };
        let found: Vec<_> = linked.intersection(&never_on).collect();
        assert!(found.is_empty(), "{name} links {found:?}");
    }
}

#[test]
fn only_steer_depends_on_aya_and_only_feed_on_kube() {
    let direct = dependencies();
    for Room { name, .. } in rooms().iter().filter(|room| room.name != KERNEL) {
        for (names, owner) in [
            (&["aya", "aya-obj", "aya-log"][..], "metadata-steer"),
            (&["kube", "k8s-openapi"], "metadata-feed"),
        ] {
            let found = names.iter().any(|one| direct[name].contains(*one));
            assert_eq!(found, name == owner, "{name} and {names:?}");
        }
    }
}

#[test]
fn what_others_write_is_parsed_in_one_place() {
    let user = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../metadata-user"));
    let crates = std::fs::read_dir(user).expect("a directory of crates");
    let crates = crates.map(|entry| entry.expect("an entry").path()).chain([user.to_owned()]);
    let mut parsing = BTreeSet::new();
    for (file, words) in
        crates.map(|path| path.join("src")).filter(|src| src.is_dir()).flat_map(|src| imports::product(&src))
    {
        let name = file.strip_prefix(user).expect("below metadata-user").to_str().expect("UTF-8").to_owned();
        let has = |of: &str, names: &[&str]| {
            let starts = words
                .windows(2)
                .enumerate()
                .filter(|(_, two)| two[0] == of && matches!(&*two[1], "::" | "as"));
            // To the end of an import, or to the name itself in code.
            starts.into_iter().any(|(at, _)| {
                let rest = words[at + 1..]
                    .iter()
                    .take_while(|word| !matches!(&***word, ";" | "(" | ")" | "=" | ">"));
                rest.into_iter().any(|word| word == "as" || names.contains(&&**word) || names.is_empty())
            })
        };
        let json = ["from_str", "from_slice", "from_reader", "Deserializer", "StreamDeserializer"];
        if has("serde_yaml", &[])
            || has("serde_json", &json)
            || has("Document", &["parse", "parse_with_options"])
        {
            parsing.insert(name);
        }
    }
    let allowed: BTreeSet<_> =
        OTHER_PARSERS.iter().map(|(file, _)| (*file).to_owned()).chain([PARSER.into()]).collect();
    assert_eq!(parsing, allowed, "left, what parses YAML, JSON or XML; right, what may: see {PARSER}");
}

#[test]
fn only_content_depends_on_a_parser_of_yaml_and_only_feed_on_one_of_xml() {
    let direct = dependencies();
    for Room { name, .. } in rooms() {
        for (parsers, owner) in [
            (
                &["serde-saphyr", "serde_yaml", "serde_yaml_ng", "serde_yml", "serde_norway", "yaml-rust2"][..],
                "metadata-content",
            ),
            (&["roxmltree", "quick-xml", "xml-rs"], "metadata-feed"),
        ] {
            let found = parsers.iter().any(|one| direct[&name].contains(*one));
            assert_eq!(found, name == owner, "{name} and {parsers:?}");
        }
    }
}

#[test]
fn the_imports_of_modules_form_no_circle() {
    let crates = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../metadata-user"));
    let below = std::fs::read_dir(crates).expect("a directory of crates");
    let below = below.map(|entry| entry.expect("an entry").path());
    let sources = below.chain([crates.to_owned()]).map(|path| path.join("src")).filter(|src| src.is_dir());
    let sources: BTreeSet<_> = sources.collect();
    let in_user_space =
        rooms().iter().filter(|room| !["metadata-common", KERNEL].contains(&&*room.name)).count();
    assert_eq!(sources.len(), in_user_space, "expected every crate of the table, found {sources:?}");
    // The test also checks `src/agent` and each directory of modules below it.
    let agent = imports::rooms(&crates.join("src/agent"));
    let rooms = sources.iter().map(|src| (src.clone(), src.clone()));
    let rooms = rooms.chain(agent.into_iter().map(|room| (crates.join("src"), room)));
    let circles: Vec<_> = rooms
        .filter_map(|(src, room)| {
            let circle = imports::circle(&imports::graph(&src, &room))?;
            Some(format!("{}:\n  {}", room.display(), circle.join("\n  ")))
        })
        .collect();
    assert!(circles.is_empty(), "modules that import each other:\n{}", circles.join("\n"));
}

/// Files that may write to standard output or standard error, and why that is safe.
const PRINTERS: [(&str, &str); 6] = [
    ("metadata-user/src/output.rs", "it escapes what it writes"),
    ("metadata-user/src/logging.rs", "its lines are `Printable`, or JSON that `audit::write_json` escapes"),
    (
        "metadata-user/control/src/screen/terminal.rs",
        "it writes cells, which `draw` fills with printable characters",
    ),
    ("metadata-user/src/service/audit.rs", "it writes JSON that it has escaped"),
    ("metadata-user/feed/src/libvirt/hook.rs", "it writes `Printable`"),
    ("metadata-user/datapath/src/afxdp/model.rs", "it prints the seed of a test"),
];

#[test]
fn only_modules_that_escape_write_to_the_terminal() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let room = top.join("metadata-user");
    let crates = std::fs::read_dir(&room).expect("a directory").map(|entry| entry.expect("an entry").path());
    let sources = crates.map(|path| path.join("src")).chain([room.join("src")]).filter(|path| path.is_dir());
    let ways: [&[&str]; 7] = [
        &["println", "!"],
        &["eprintln", "!"],
        &["print", "!"],
        &["eprint", "!"],
        &["dbg", "!"],
        &["io", "::", "stdout"],
        &["io", "::", "stderr", "(", ")"],
    ];
    let mut found = Vec::new();
    for (file, words) in sources.flat_map(|path| imports::sources(&path)) {
        let name = file.strip_prefix(&top).expect("below the top").to_str().expect("UTF-8").to_owned();
        let is_test = name.ends_with("tests.rs") || name.contains("/tests/");
        if is_test || PRINTERS.iter().any(|(printer, _)| *printer == name) {
            continue;
        }
        let prints = |way: &&&[&str]| words.windows(way.len()).any(|at| at == **way);
        found.extend(ways.iter().filter(prints).map(|way| format!("{name}: {}", way.concat())));
    }
    assert!(found.is_empty(), "use `output`, which escapes what others wrote: {found:#?}");
}

// Every file of tests is part of a program: Cargo runs only those that `tests/Cargo.toml` names (`autotests = false`),
// and a program has only the modules that it declares. Any other file is never compiled and cannot fail.

/// Files below a directory that neither the manifest names nor the file above them declares.
fn forgotten(top: &Path) -> Vec<PathBuf> {
    let manifest = std::fs::read_to_string(top.join("Cargo.toml")).expect("a manifest");
    let is_forgotten = |file: &PathBuf| {
        let (stem, directory) = (file.file_stem().expect("a name"), file.parent().expect("a directory"));
        let above = ["main.rs", "lib.rs"].map(|root| directory.join(root));
        let declared = format!("mod {};", stem.display());
        let declares =
            |file: &PathBuf| std::fs::read_to_string(file).is_ok_and(|text| text.contains(&declared));
        !manifest.contains(&format!("\"{}\"", file.strip_prefix(top).expect("below the top").display()))
            && !above.contains(file)
            && !above.iter().chain([&directory.with_extension("rs")]).any(declares)
    };
    // The fuzz targets have a manifest of their own.
    let mut files = Vec::new();
    imports::collect(top, &mut files);
    files.retain(|file| !file.starts_with(top.join("fuzz")) && is_forgotten(file));
    files
}

#[test]
fn every_file_of_tests_is_part_of_a_program() {
    assert_eq!(forgotten(Path::new(env!("CARGO_MANIFEST_DIR"))), Vec::<PathBuf>::new());
}

#[test]
fn a_file_that_no_program_has_is_reported() {
    let directory = tempfile::tempdir().expect("a directory");
    let put = |name: &str, text: &str| {
        let file = directory.path().join(name);
        std::fs::create_dir_all(file.parent().expect("a directory")).expect("made");
        std::fs::write(file, text).expect("written");
    };
    put("Cargo.toml", "[[test]]\nname = \"a\"\npath = \"a/main.rs\"\n\n[[test]]\npath = \"b.rs\"\n");
    put("a/main.rs", "mod c;\n");
    for (file, text) in
        [("a/c.rs", "mod d;\n"), ("a/c/d.rs", ""), ("a/c/e.rs", ""), ("b.rs", ""), ("f.rs", "")]
    {
        put(file, text);
    }
    let mut found = forgotten(directory.path());
    found.sort();
    assert_eq!(found, ["a/c/e.rs", "f.rs"].map(|file| directory.path().join(file)));
}

// The names of types: each stands once, is a noun, and is the field's word.

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
