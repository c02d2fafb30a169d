use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::state::save_queue::{RETRY_MOST, SAVE_PAUSE};
use metadata_content::mailbox::{
    ATTRIBUTE_NAME_CHARS, ATTRIBUTES_BYTES_PER_VM, ATTRIBUTES_PER_VM, DOCUMENT_BYTES, EveDocument,
    PASSWORD_BYTES,
};

const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
const RECORD: &str = include_str!("../../../../../tests/vectors/record.yaml");

fn uuid() -> Owner {
    serde_json::from_value(UUID.into()).expect("an owner")
}

fn open(directory: &Path) -> (Mailboxes, SaveQueue) {
    let saves = SaveQueue::default();
    (Mailboxes::open(directory, Outbox::detached(), &saves).expect("a state directory"), saves)
}

/// What a new agent finds for the VM.
fn found_after_restart(directory: &Path) -> Arc<Mailbox> {
    open(directory).0.get(&uuid())
}

/// Sets one value of each kind.
fn fill(mailbox: &Mailbox) {
    mailbox.note_record("web", Some("secret"));
    mailbox.take_password();
    mailbox.post_password(b"posted").expect("the first");
    mailbox.set_attribute("ns", "key", &[0, 255]).expect("small");
    mailbox.store_document(EveDocument::AppCustomStatus, b"{}").expect("small");
}

fn assert_filled(mailbox: &Mailbox) {
    assert!(mailbox.password_taken());
    assert_eq!(mailbox.posted_password(), "posted");
    assert_eq!(mailbox.attribute("ns", "key").as_deref(), Some([0, 255].as_slice()));
    assert_eq!(mailbox.document(EveDocument::AppCustomStatus).as_deref(), Some(b"{}".as_slice()));
}

fn assert_empty(mailbox: &Mailbox) {
    assert!(!mailbox.password_taken());
    assert_eq!(mailbox.posted_password(), "");
    assert_eq!(mailbox.attributes(), []);
    assert_eq!(mailbox.document(EveDocument::AppCustomStatus), None);
}

#[test]
fn formats_of_every_release_are_read() {
    let room = tempfile::tempdir().expect("a directory");
    let file = room.path().join(format!("{UUID}.json"));
    let (mailboxes, saves) = open(room.path());
    fill(&mailboxes.get(&uuid()));
    saves.flush();
    golden::check("mailbox", MailboxState::VERSION, &fs::read(&file).expect("bytes"));
    for sample in golden::all("mailbox") {
        fs::write(&file, &sample.bytes).expect("written");
        assert_filled(&found_after_restart(room.path()));
    }
}

#[test]
fn a_file_of_a_later_version_stays_until_the_vm_writes_and_is_then_kept_beside() {
    let room = tempfile::tempdir().expect("a directory");
    let file = room.path().join(format!("{UUID}.json"));
    for later in [r#"{"version":2}"#, r#"{"version":7,"taken_password":["other fields"]}"#] {
        fs::write(&file, later).expect("written");
        let (mailboxes, saves) = open(room.path());
        let mailbox = mailboxes.get(&uuid());
        assert_empty(&mailbox);
        saves.flush();
        mailboxes.reload();
        assert_eq!(mailboxes.counts().loads_failed, 2, "at the load, and when it is read again");
        // An agent that wrote it may still run, so the file is where it was.
        assert_eq!(fs::read_to_string(&file).expect("it is there"), later);
        fill(&mailbox);
        saves.flush();
        assert_filled(&found_after_restart(room.path()));
        let kept = file.with_extension(format!(
            "json.v{}",
            MailboxState::version_of(later.as_bytes()).expect("a version")
        ));
        assert_eq!(fs::read_to_string(&kept).expect("it is kept"), later);
    }
    fs::write(&file, r#"{"version":2}"#).expect("written");
    let text = read(&file, UUID).map(drop).expect_err("a refusal").to_string();
    for part in ["a mailbox of version 1, found version 2", "start a release that reads it", "`.v2`"] {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
}

#[test]
fn all_slots_of_a_vm_share_a_mailbox_that_outlives_a_new_record() {
    let (record, _) = Record::parse("record.yaml", RECORD).expect("a good record");
    let mailboxes = Mailboxes::in_memory(Outbox::detached());
    let first = mailboxes.for_record(RecordSource::File, "web.yaml", &record);
    first.take_password();
    let again = mailboxes.for_record(RecordSource::File, "web.yaml", &record);
    assert!(Arc::ptr_eq(&first, &again));
    assert!(again.password_taken());
    mailboxes.forget(&record.owner()).expect("nothing on disk");
    assert!(
        !mailboxes.for_record(RecordSource::File, "web.yaml", &record).password_taken(),
        "the next VM of that owner begins again"
    );
}

#[tokio::test(start_paused = true)]
async fn what_a_vm_wrote_survives_a_restart_in_a_private_file() {
    let room = tempfile::tempdir().expect("a directory");
    let directory = room.path().join("mailboxes");
    let (mailboxes, saves) = open(&directory);
    let mailbox = mailboxes.get(&uuid());
    fill(&mailbox);
    drop((mailbox, mailboxes));
    let running = tokio::spawn(saves.run());
    tokio::time::sleep(2 * SAVE_PAUSE).await;
    running.abort();
    let file = directory.join(format!("{UUID}.json"));
    assert_eq!(fs::metadata(&file).expect("saved").permissions().mode() & 0o7777, 0o600);
    assert_eq!(fs::metadata(&directory).expect("made").permissions().mode() & 0o7777, 0o700);
    let text = fs::read_to_string(&file).expect("text");
    assert!(!text.contains("secret"), "the record's password is in the file");
    let found = found_after_restart(&directory);
    assert_filled(&found);
    found.note_record("web", Some("secret"));
    assert!(found.password_taken(), "the record still has the password that was taken");
    found.note_record("web", Some("changed"));
    assert!(!found.password_taken(), "the record's password changed while no agent ran");
}

#[test]
fn the_end_of_the_agent_saves_what_the_saver_has_not() {
    let room = tempfile::tempdir().expect("a directory");
    let (mailboxes, saves) = open(room.path());
    fill(&mailboxes.get(&uuid()));
    saves.flush();
    assert_eq!(mailboxes.counts(), MailboxCounts::default());
    assert_filled(&found_after_restart(room.path()));
}

#[test]
fn a_vm_that_wrote_nothing_has_no_file() {
    let room = tempfile::tempdir().expect("a directory");
    let (mailboxes, saves) = open(room.path());
    mailboxes.get(&uuid()).note_record("web", Some("secret"));
    saves.flush();
    assert_eq!(fs::read_dir(room.path()).expect("listed").count(), 0);
}

#[test]
fn a_change_after_a_write_is_written_by_the_next() {
    let room = tempfile::tempdir().expect("a directory");
    let (mailboxes, saves) = open(room.path());
    let mailbox = mailboxes.get(&uuid());
    for value in [b"before".as_slice(), b"after"] {
        for n in 0..1_000 {
            mailbox.set_attribute("ns", "other", &[n as u8]).expect("small");
        }
        mailbox.set_attribute("ns", "key", value).expect("small");
        saves.flush();
        assert_eq!(found_after_restart(room.path()).attribute("ns", "key").as_deref(), Some(value));
    }
}

#[test]
fn a_forgotten_vm_leaves_no_file_though_a_slot_still_writes() {
    let room = tempfile::tempdir().expect("a directory");
    let (mailboxes, saves) = open(room.path());
    let mailbox = mailboxes.get(&uuid());
    fill(&mailbox);
    saves.flush();
    mailboxes.forget(&uuid()).expect("removed");
    mailbox.set_attribute("ns", "late", b"v").expect("small");
    saves.flush();
    assert_eq!(saves.failed(), 0);
    assert_eq!(fs::read_dir(room.path()).expect("listed").count(), 0);
    assert_empty(&mailboxes.get(&uuid()));
}

#[test]
fn only_files_of_ended_vms_are_removed() {
    let room = tempfile::tempdir().expect("a directory");
    let name = |n: u32, end: &str| format!("7c0f1a52-3b5e-4d1a-9d2c-{n:012x}{end}");
    let others = [name(4, ".txt"), name(4, ".json.vx"), name(5, ".json.v2")];
    for file in [&name(1, ".json"), &name(2, ".json"), &name(3, ".json.bad"), "notes.json"]
        .into_iter()
        .chain(others.iter().map(String::as_str))
    {
        fs::write(room.path().join(file), "{}").expect("written");
    }
    let (mailboxes, _saves) = open(room.path());
    assert_eq!(mailboxes.sweep([&*name(1, "")]).expect("swept"), 3);
    let mut left: Vec<_> = fs::read_dir(room.path())
        .expect("listed")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("text"))
        .collect();
    left.sort();
    assert_eq!(left, [name(1, ".json"), name(4, ".json.vx"), name(4, ".txt"), "notes.json".to_owned()]);
}

#[test]
fn an_unreadable_file_is_set_aside_and_the_vm_starts_empty() {
    for (case, text) in [
        ("no JSON", "posted".to_owned()),
        ("no version", r#"{"attributes":{}}"#.to_owned()),
        ("too large", " ".repeat((4 << 20) + 1)),
    ] {
        let room = tempfile::tempdir().expect("a directory");
        let file = room.path().join(format!("{UUID}.json"));
        fs::write(&file, &text).expect("written");
        let (mailboxes, saves) = open(room.path());
        let mailbox = mailboxes.get(&uuid());
        assert_empty(&mailbox);
        assert_eq!(mailboxes.counts().loads_failed, 1, "{case}");
        let aside = fs::read_to_string(file.with_extension("json.bad")).expect("put aside");
        assert_eq!(aside, text, "{case}");
        fill(&mailbox);
        saves.flush();
        assert_filled(&found_after_restart(room.path()));
    }
}

#[test]
fn a_full_mailbox_fits_the_file_that_is_read() {
    let room = tempfile::tempdir().expect("a directory");
    let (mailboxes, saves) = open(room.path());
    let mailbox = mailboxes.get(&uuid());
    let longest = |n: usize| format!("{n:0>ATTRIBUTE_NAME_CHARS$}");
    for n in 0..ATTRIBUTES_PER_VM {
        let value = [255; ATTRIBUTES_BYTES_PER_VM / ATTRIBUTES_PER_VM - 2 * ATTRIBUTE_NAME_CHARS];
        let set = mailbox.set_attribute(&longest(n), &longest(n), &value);
        set.expect("within the bounds");
    }
    for document in [EveDocument::Kubeconfig, EveDocument::AppCustomStatus] {
        mailbox.store_document(document, &[255; DOCUMENT_BYTES]).expect("within the bounds");
    }
    mailbox.post_password(&[255; PASSWORD_BYTES]).expect("within the bounds");
    saves.flush();
    let found = found_after_restart(room.path());
    assert_eq!(found.attributes(), mailbox.attributes());
}

#[test]
fn a_failed_write_is_counted_and_the_guest_keeps_its_answer() {
    let room = tempfile::tempdir().expect("a directory");
    let directory = room.path().join("mailboxes");
    let (mailboxes, saves) = open(&directory);
    let mailbox = mailboxes.get(&uuid());
    fill(&mailbox);
    fs::remove_dir(&directory).expect("removed");
    saves.flush();
    assert_eq!(mailboxes.counts().saves_failed, 1);
    let unsaved = saves.unsaved(StateFile::is_irreplaceable).expect("it is reported");
    assert!(unsaved.to_string().contains(UUID), "{unsaved}");
    assert_filled(&mailbox);
    fs::create_dir(&directory).expect("made again");
    saves.flush();
    assert_filled(&found_after_restart(&directory));
    assert_eq!(saves.unsaved(|_| true), None);
}

#[tokio::test(start_paused = true)]
async fn what_a_vm_wrote_to_a_full_disk_is_written_without_another_change() {
    let room = tempfile::tempdir().expect("a directory");
    let directory = room.path().join("mailboxes");
    let (mailboxes, saves) = open(&directory);
    let running = tokio::spawn(saves.clone().run());
    fs::remove_dir(&directory).expect("removed");
    fill(&mailboxes.get(&uuid()));
    tokio::time::sleep(4 * RETRY_MOST).await;
    assert_eq!(saves.unsaved_count(), 1);
    fs::create_dir(&directory).expect("made again");
    tokio::time::sleep(RETRY_MOST + 2 * SAVE_PAUSE).await;
    running.abort();
    assert_filled(&found_after_restart(&directory));
}

#[test]
fn a_later_vm_does_not_read_a_file_that_could_not_be_removed() {
    let room = tempfile::tempdir().expect("a directory");
    let (mailboxes, saves) = open(room.path());
    fill(&mailboxes.get(&uuid()));
    saves.flush();
    // A directory in the way of the second removal is what fails for root too.
    let bad = room.path().join(format!("{UUID}.json.bad"));
    fs::create_dir(&bad).expect("in the way");
    let file = room.path().join(format!("{UUID}.json"));
    let text = fs::read(&file).expect("a file");
    mailboxes.forget(&uuid()).expect_err("it cannot be removed");
    fs::write(&file, text).expect("as if it had stayed");
    let later = mailboxes.get(&uuid());
    assert_empty(&later);
    fs::remove_dir(&bad).expect("out of the way");
    later.set_attribute("ns", "key", b"later").expect("small");
    saves.flush();
    assert_eq!(saves.unsaved(|_| true), None);
    let found = found_after_restart(room.path());
    assert_eq!(
        (found.posted_password(), found.attribute("ns", "key").as_deref()),
        ("".into(), Some(&b"later"[..]))
    );
}

#[test]
fn a_state_path_that_is_no_directory_is_refused() {
    let room = tempfile::tempdir().expect("a directory");
    let file = room.path().join("file");
    fs::write(&file, "").expect("written");
    let error = Mailboxes::open(&file, Outbox::detached(), &SaveQueue::default())
        .expect_err("a file is no directory");
    assert!(error.to_string().contains("check the state directory"), "{error}");
    for (source, names_unit) in
        [(io::ErrorKind::ReadOnlyFilesystem, true), (io::ErrorKind::PermissionDenied, false)]
    {
        let path = file.clone();
        let error = MailboxError { action: "make", path, source: source.into() };
        assert_eq!(error.to_string().contains("ReadWritePaths="), names_unit, "{error}");
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("listed");
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect();
    names.sort();
    names
}

/// A record with this owner and the UUID of the others.
fn owned(owner: Option<Owner>) -> Record {
    let (mut record, _) = Record::parse("record.yaml", RECORD).expect("a good record");
    record.vm.owner = owner;
    record.admin = serde_json::from_str(r#"{"password":"secret"}"#).expect("an account");
    record
}

#[test]
fn vms_of_one_uuid_share_nothing_in_memory_and_on_disk() {
    let room = tempfile::tempdir().expect("a directory");
    let (a, b) = (Owner::kubevirt("a", "test", "1"), Owner::kubevirt("b", "test", "2"));
    let records = [owned(Some(a)), owned(Some(b)), owned(Some(Owner::proxmox("c", 1, "2"))), owned(None)];
    let (mailboxes, saves) = open(room.path());
    let [victim, others @ ..] =
        &records.each_ref().map(|record| mailboxes.for_record(RecordSource::Api, "x", record));
    fill(victim);
    for other in others {
        assert_empty(other);
        assert!(!Arc::ptr_eq(other.account(), victim.account()), "one account");
        other.set_attribute("ns", "key", other.vm().as_bytes()).expect("small");
    }
    saves.flush();
    let files = names(room.path());
    assert_eq!(files.len(), 4);
    assert!(files.contains(&format!("{UUID}.json")), "{files:?}");
    for file in &files {
        assert!(file.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte)), "{file}");
    }
    let (mailboxes, _saves) = open(room.path());
    for (at, record) in records.iter().enumerate() {
        let found = mailboxes.get(&record.owner());
        match at {
            0 => assert_filled(&found),
            _ => assert_eq!(found.attribute("ns", "key").as_deref(), Some(record.owner_text().as_bytes())),
        }
    }
    assert_eq!(mailboxes.sweep([records[0].owner_text()]).expect("swept"), 0, "they are loaded");
    let (mailboxes, _saves) = open(room.path());
    assert_eq!(mailboxes.sweep([records[0].owner_text()]).expect("swept"), 3);
    assert_filled(&mailboxes.get(&records[0].owner()));
}

#[test]
fn a_file_of_another_owner_is_set_aside() {
    let room = tempfile::tempdir().expect("a directory");
    let (a, b) = (Owner::kubevirt("a", "test", "1"), Owner::kubevirt("b", "test", "2"));
    let (mailboxes, saves) = open(room.path());
    fill(&mailboxes.get(&a));
    saves.flush();
    let [file] = &names(room.path())[..] else { panic!("one file") };
    for (owner, moved) in [(&b, format!("{}.json", stem(b.as_str()))), (&uuid(), format!("{UUID}.json"))] {
        fs::copy(room.path().join(file), room.path().join(&moved)).expect("copied");
        let (mailboxes, _saves) = open(room.path());
        assert_empty(&mailboxes.get(owner));
        assert_eq!(mailboxes.counts().loads_failed, 1, "{moved}");
        assert!(names(room.path()).contains(&format!("{moved}.bad")), "{:?}", names(room.path()));
    }
}

/// What an earlier release kept by UUID, and which records had the UUID.
fn former(records: &[(RecordSource, &str)]) -> (tempfile::TempDir, FormerRecords) {
    let room = tempfile::tempdir().expect("a directory");
    let (mailboxes, saves) = open(room.path());
    fill(&mailboxes.get(&uuid()));
    saves.flush();
    let mut former = FormerRecords::default();
    for (source, key) in records {
        former.note(UUID, *source, key);
    }
    (room, former)
}

#[test]
fn what_an_earlier_release_kept_by_uuid_goes_to_the_one_record_that_had_it() {
    let ours = [(RecordSource::Kubevirt, "a/test")];
    let moving = [(RecordSource::Kubevirt, "a/test"), (RecordSource::Kubevirt, "a/test@pod-2")];
    let shared = [(RecordSource::Kubevirt, "a/test"), (RecordSource::Kubevirt, "b/test")];
    let in_front = [(RecordSource::File, "x.yaml"), (RecordSource::Kubevirt, "a/test")];
    let operators = [(RecordSource::File, "x.yaml"), (RecordSource::Api, "x")];
    let a = || owned(Some(Owner::kubevirt("a", "test", "1")));
    let b = || owned(Some(Owner::kubevirt("b", "test", "2")));
    let none: [(RecordSource, &str); 0] = [];
    for (case, had, (source, key), record, is_taken, left) in [
        ("the one record", &ours[..], (RecordSource::Kubevirt, "a/test"), a(), true, ""),
        (
            "twice, for a migration within the node",
            &moving,
            (RecordSource::Kubevirt, "a/test"),
            a(),
            true,
            "",
        ),
        ("another VM with that UUID", &ours, (RecordSource::Kubevirt, "b/test"), b(), false, "former-"),
        ("an operator's new record", &ours, (RecordSource::Api, "x"), owned(None), false, "former-"),
        ("two VMs", &shared, (RecordSource::Kubevirt, "a/test"), a(), false, ".shared"),
        ("a record in front of it", &in_front, (RecordSource::Kubevirt, "a/test"), a(), false, ".shared"),
        ("operators' records", &operators, (RecordSource::File, "x.yaml"), owned(None), true, UUID),
        ("nothing is known", &none, (RecordSource::Kubevirt, "a/test"), a(), false, UUID),
    ] {
        // With and without an earlier agent that runs until this one takes over.
        for takes_over in [false, true] {
            let (room, former) = former(had);
            let (mailboxes, saves) = open(room.path());
            mailboxes.set_former(former);
            let mailbox = if takes_over {
                let before = names(room.path());
                let mailbox = mailboxes.for_record(source, key, &record);
                assert_eq!(names(room.path()), before, "{case}: the earlier agent still writes");
                mailboxes.reload();
                mailbox
            } else {
                mailboxes.take_charge();
                mailboxes.for_record(source, key, &record)
            };
            let found = mailbox.posted_password();
            assert_eq!(found == "posted", is_taken, "{case}, {takes_over}: {:?}", names(room.path()));
            let files = names(room.path());
            let is_left = files.iter().any(|file| file.contains(left) && !file.starts_with("kubevirt-"));
            assert!(left.is_empty() || is_left, "{case}, {takes_over}: {files:?}");
            assert_eq!(mailboxes.counts().loads_failed, u64::from(left == ".shared"), "{case}");
            if is_taken {
                mailbox.note_record("web", Some("secret"));
                assert!(mailbox.password_taken(), "{case}: a password that was taken comes back");
                mailbox.set_attribute("ns", "late", b"v").expect("small");
                saves.flush();
                let again = open(room.path()).0.get(&record.owner());
                assert_eq!(again.attribute("ns", "late").as_deref(), Some(b"v".as_slice()), "{case}");
                again.note_record("web", Some("secret"));
                assert!(again.password_taken(), "{case}: after a restart");
            }
        }
    }
}

#[test]
fn a_file_that_waits_for_its_record_survives_a_restart_and_goes_with_its_vm() {
    let (room, former) = former(&[(RecordSource::Proxmox, "100")]);
    let (mailboxes, _saves) = open(room.path());
    mailboxes.set_former(former);
    mailboxes.take_charge();
    // The agent ends before the record arrives. The next one knows nothing of earlier records.
    let (mailboxes, _saves) = open(room.path());
    mailboxes.take_charge();
    let record = owned(Some(Owner::proxmox("pve", 100, "17")));
    let stranger = owned(Some(Owner::proxmox("pve", 101, "17")));
    assert_empty(&mailboxes.for_record(RecordSource::Proxmox, "101", &stranger));
    assert_filled(&mailboxes.for_record(RecordSource::Proxmox, "100", &record));

    let (room, former) = self::former(&[(RecordSource::Proxmox, "100")]);
    let (mailboxes, _saves) = open(room.path());
    mailboxes.set_former(former);
    mailboxes.take_charge();
    assert_eq!(mailboxes.sweep([]).expect("swept"), 1, "its VM ended");
    assert!(names(room.path()).is_empty());
}

/// A record with this instance-id and the UUID of the others.
fn instance(id: &str) -> Record {
    let mut record = owned(None);
    record.vm.instance_id = Some(serde_json::from_value(id.into()).expect("a line"));
    record
}

#[test]
fn a_vm_that_is_built_anew_does_not_find_what_its_predecessor_wrote() {
    for (case, is_restarted) in [("while an agent runs", false), ("while none runs", true)] {
        let room = tempfile::tempdir().expect("a directory");
        let (mut mailboxes, mut saves) = open(room.path());
        fill(&mailboxes.for_record(RecordSource::File, "x", &instance("first")));
        saves.flush();
        if is_restarted {
            (mailboxes, saves) = open(room.path());
        }
        assert_filled(&mailboxes.for_record(RecordSource::File, "x", &instance("first")));
        assert_empty(&mailboxes.for_record(RecordSource::File, "x", &instance("second")));
        saves.flush();
        assert_empty(&found_after_restart(room.path()));
        let again = open(room.path()).0.for_record(RecordSource::File, "x", &instance("first"));
        assert_empty(&again);
        assert_eq!(again.post_password(b"posted"), Ok(()), "{case}");
    }
}

#[test]
fn the_next_agent_takes_nothing_over_that_was_of_another_instance_id() {
    let room = tempfile::tempdir().expect("a directory");
    let (former, saves) = open(room.path());
    let written = former.for_record(RecordSource::File, "x", &instance("first"));
    // The next agent has the new record already, and the former one has not.
    let (next, next_saves) = open(room.path());
    let read = next.for_record(RecordSource::File, "x", &instance("second"));
    fill(&written);
    saves.flush();
    next.reload();
    assert_empty(&read);
    next_saves.flush();
    assert_empty(&found_after_restart(room.path()));
}

#[test]
fn a_file_without_an_instance_id_goes_to_the_record_that_has_its_vm() {
    let room = tempfile::tempdir().expect("a directory");
    let (mailboxes, saves) = open(room.path());
    fill(&mailboxes.get(&uuid()));
    saves.flush();
    let before = fs::read(room.path().join(format!("{UUID}.json"))).expect("a file");
    let (mailboxes, saves) = open(room.path());
    let mailbox = mailboxes.for_record(RecordSource::File, "x", &instance("first"));
    assert_filled(&mailbox);
    saves.flush();
    assert_eq!(
        fs::read(room.path().join(format!("{UUID}.json"))).expect("a file"),
        before,
        "not written yet"
    );
    assert!(mailboxes.clear(&uuid()));
    saves.flush();
    assert_empty(&found_after_restart(room.path()));
}
