use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::record::Record;
use crate::record::values::Uuid;

const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
const RECORD: &str = include_str!("../../../tests/vectors/record.yaml");

fn mailbox() -> Mailbox {
    Mailbox::new(UUID, &Outbox::detached())
}

fn uuid() -> Uuid {
    serde_json::from_value(UUID.into()).expect("a UUID")
}

fn open(directory: &Path) -> (Mailboxes, Saves) {
    Mailboxes::open(directory, Outbox::detached()).expect("a state directory")
}

/// What an agent that starts now finds for the VM.
fn found_after_restart(directory: &Path) -> Arc<Mailbox> {
    open(directory).0.get(&uuid())
}

#[test]
fn a_password_is_posted_once_and_within_its_size() {
    let mailbox = mailbox();
    assert_eq!(mailbox.posted_password(), "");
    assert_eq!(mailbox.post_password(b""), Err(PasswordRefused::Empty));
    assert_eq!(mailbox.post_password(&[b'x'; PASSWORD_OCTETS + 1]), Err(PasswordRefused::TooLarge));
    assert_eq!(mailbox.posted_password(), "", "a refused password was kept");
    let longest = [b'x'; PASSWORD_OCTETS];
    assert_eq!(mailbox.post_password(&longest), Ok(()));
    assert_eq!(mailbox.post_password(b"other"), Err(PasswordRefused::AlreadySet));
    assert_eq!(mailbox.post_password(b""), Err(PasswordRefused::Empty), "the size is looked at first");
    assert_eq!(mailbox.posted_password(), longest.as_slice());
}

#[test]
fn the_records_password_is_given_until_it_is_saved_and_again_when_it_changes() {
    let mailbox = mailbox();
    mailbox.note_record("web", Some("first"));
    assert!(!mailbox.password_taken());
    mailbox.take_password();
    mailbox.take_password();
    assert!(mailbox.password_taken());
    mailbox.note_record("renamed", Some("first"));
    assert!(mailbox.password_taken(), "the record was rendered anew with the same password");
    for changed in [Some("second"), Some("first"), None] {
        mailbox.note_record("web", changed);
        assert!(!mailbox.password_taken(), "another password begins anew");
        mailbox.take_password();
        assert!(mailbox.password_taken());
    }
}

#[test]
fn attributes_are_listed_in_order_and_counted_by_their_changes() {
    let mailbox = mailbox();
    assert_eq!(mailbox.attributes(), []);
    let set = |namespace, key, value: &str| mailbox.set_attribute(namespace, key, value.as_bytes());
    assert_eq!(set("hostkeys", "ssh-rsa", "AAAA"), Ok(()));
    assert_eq!(set("hostkeys", "ssh-ed25519", "BBBB"), Ok(()));
    assert_eq!(set("a:b", "k", ""), Ok(()));
    let listed = mailbox.attributes();
    let expected = [("a:b", vec!["k"]), ("hostkeys", vec!["ssh-ed25519", "ssh-rsa"])];
    assert_eq!(
        listed,
        expected.map(|(ns, keys)| (ns.to_owned(), keys.into_iter().map(String::from).collect()))
    );
    assert_eq!(mailbox.attributes_version(), 3);
    assert_eq!(set("a:b", "k", ""), Ok(()));
    assert_eq!(mailbox.attributes_version(), 3, "the same value is no change");
    assert_eq!(set("a:b", "k", "v"), Ok(()));
    assert_eq!(mailbox.attribute("a:b", "k").as_deref(), Some(b"v".as_slice()));
    assert!(mailbox.delete_attribute("a:b", "k"));
    assert!(!mailbox.delete_attribute("a:b", "k"));
    assert!(!mailbox.delete_attribute("none", "k"));
    assert_eq!(mailbox.attributes_version(), 5);
    assert_eq!(mailbox.attribute("a:b", "k"), None);
    assert_eq!(mailbox.attributes().len(), 1, "an empty namespace is none");
}

#[test]
fn attributes_stay_within_their_bounds() {
    let mailbox = mailbox();
    let long = "n".repeat(ATTRIBUTE_NAME_CHARS);
    let longer = "n".repeat(ATTRIBUTE_NAME_CHARS + 1);
    for name in ["", "a/b", "a b", "ü", "a\n", &longer] {
        assert_eq!(mailbox.set_attribute(name, "k", b"v"), Err(AttributeRefused::Name), "{name:?}");
        assert_eq!(mailbox.set_attribute("n", name, b"v"), Err(AttributeRefused::Name), "{name:?}");
    }
    let largest = vec![b'v'; ATTRIBUTE_OCTETS];
    assert_eq!(mailbox.set_attribute(&long, &long, &largest), Ok(()));
    assert_eq!(
        mailbox.set_attribute("n", "k", &[largest, vec![0]].concat()),
        Err(AttributeRefused::TooLarge)
    );
    for n in 1..ATTRIBUTES_PER_VM {
        assert_eq!(mailbox.set_attribute(&format!("n{}", n % 7), &format!("k{n}"), b"v"), Ok(()));
    }
    assert_eq!(mailbox.set_attribute("n", "one-more", b"v"), Err(AttributeRefused::Full));
    assert_eq!(mailbox.set_attribute("n1", "k1", b"new"), Ok(()), "no more than before");
    assert!(mailbox.delete_attribute("n1", "k1"));
    assert_eq!(mailbox.set_attribute("n", "one-more", b"v"), Ok(()));
}

#[test]
fn attributes_together_are_bounded_and_a_shorter_one_makes_room() {
    let mailbox = mailbox();
    let value = vec![b'v'; ATTRIBUTE_OCTETS - 2];
    for n in 0..ATTRIBUTES_OCTETS_PER_VM / ATTRIBUTE_OCTETS {
        assert_eq!(mailbox.set_attribute("n", &n.to_string(), &value), Ok(()), "{n}");
    }
    assert_eq!(mailbox.set_attribute("n", "8", b""), Err(AttributeRefused::TooMuch));
    assert_eq!(mailbox.set_attribute("n", "0", &value[..9]), Ok(()));
    assert_eq!(mailbox.set_attribute("n", "8", b""), Ok(()));
    assert_eq!(mailbox.set_attribute("n", "0", &value), Err(AttributeRefused::TooMuch));
}

#[test]
fn documents_are_kept_apart_and_within_their_size() {
    let mailbox = mailbox();
    assert_eq!(mailbox.document(Document::Kubeconfig), None);
    let largest = vec![b'k'; DOCUMENT_OCTETS];
    assert_eq!(mailbox.store_document(Document::Kubeconfig, &largest), Ok(()));
    let larger = vec![b'k'; DOCUMENT_OCTETS + 1];
    assert_eq!(mailbox.store_document(Document::Kubeconfig, &larger), Err(DocumentTooLarge));
    assert_eq!(mailbox.document(Document::Kubeconfig).as_deref(), Some(largest.as_slice()));
    assert_eq!(mailbox.document(Document::AppCustomStatus), None);
}

#[test]
fn a_wait_too_many_ends_the_oldest_and_is_counted() {
    let outbox = Outbox::detached();
    let mailbox = Mailbox::new(UUID, &outbox);
    let mut waits: Vec<_> = (0..WAITS_PER_VM).map(|_| mailbox.wait()).collect();
    assert!(waits.iter().all(|wait| !wait.is_ended()));
    drop(waits.remove(3));
    waits.push(mailbox.wait());
    assert!(waits.iter().all(|wait| !wait.is_ended()), "the dropped one's place was not free");
    waits.push(mailbox.wait());
    let ended: Vec<_> = waits.iter().map(|wait| wait.is_ended()).collect();
    assert_eq!(ended.iter().position(|ended| *ended), Some(0));
    assert_eq!(ended.iter().filter(|ended| **ended).count(), 1);
    assert_eq!(outbox.counts().waits_ended, 1);
}

/// Sets one of everything.
fn fill(mailbox: &Mailbox) {
    mailbox.note_record("web", Some("secret"));
    mailbox.take_password();
    mailbox.post_password(b"posted").expect("the first");
    mailbox.set_attribute("ns", "key", &[0, 255]).expect("small");
    mailbox.store_document(Document::AppCustomStatus, b"{}").expect("small");
}

fn assert_filled(mailbox: &Mailbox) {
    assert!(mailbox.password_taken());
    assert_eq!(mailbox.posted_password(), "posted");
    assert_eq!(mailbox.attribute("ns", "key").as_deref(), Some([0, 255].as_slice()));
    assert_eq!(mailbox.document(Document::AppCustomStatus).as_deref(), Some(b"{}".as_slice()));
}

fn assert_empty(mailbox: &Mailbox) {
    assert!(!mailbox.password_taken());
    assert_eq!(mailbox.posted_password(), "");
    assert_eq!(mailbox.attributes(), []);
    assert_eq!(mailbox.document(Document::AppCustomStatus), None);
}

#[test]
fn all_slots_of_a_vm_share_a_mailbox_that_outlives_a_new_record() {
    let (record, _) = Record::parse("record.yaml", RECORD).expect("a good record");
    let mailboxes = Mailboxes::in_memory(Outbox::detached());
    let first = mailboxes.for_record(&record);
    first.take_password();
    let again = mailboxes.for_record(&record);
    assert!(Arc::ptr_eq(&first, &again));
    assert!(again.password_taken());
    mailboxes.forget(&record.vm.uuid).expect("nothing on disk");
    assert!(!mailboxes.for_record(&record).password_taken(), "the next VM of that UUID begins anew");
}

#[tokio::test]
async fn what_a_vm_wrote_survives_a_restart_in_a_private_file() {
    let room = tempfile::tempdir().expect("a directory");
    let directory = room.path().join("mailboxes");
    let (mailboxes, saves) = open(&directory);
    let mailbox = mailboxes.get(&uuid());
    fill(&mailbox);
    // The saver ends when nobody can change anything any more.
    drop((mailbox, mailboxes));
    save(saves).await;
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
    drop(saves);
    fill(&mailboxes.get(&uuid()));
    mailboxes.save_all();
    assert_eq!(mailboxes.counts(), MailboxCounts::default());
    assert_filled(&found_after_restart(room.path()));
}

#[test]
fn a_vm_that_wrote_nothing_has_no_file() {
    let room = tempfile::tempdir().expect("a directory");
    let (mailboxes, _saves) = open(room.path());
    mailboxes.get(&uuid()).note_record("web", Some("secret"));
    mailboxes.save_all();
    assert_eq!(fs::read_dir(room.path()).expect("listed").count(), 0);
}

#[test]
fn a_guest_that_keeps_writing_is_in_the_queue_once() {
    let room = tempfile::tempdir().expect("a directory");
    let (mailboxes, mut saves) = open(room.path());
    let mailbox = mailboxes.get(&uuid());
    for n in 0..1_000 {
        mailbox.set_attribute("ns", "key", &[n as u8]).expect("small");
    }
    assert!(saves.queue.try_recv().is_ok());
    assert!(saves.queue.try_recv().is_err(), "it is queued a second time");
}

#[test]
fn a_change_during_a_save_is_saved_by_the_next() {
    let room = tempfile::tempdir().expect("a directory");
    let (mailboxes, mut saves) = open(room.path());
    let mailbox = mailboxes.get(&uuid());
    mailbox.set_attribute("ns", "key", b"before").expect("small");
    saves.queue.try_recv().expect("queued").save().expect("saved");
    mailbox.set_attribute("ns", "key", b"after").expect("small");
    saves.queue.try_recv().expect("queued again").save().expect("saved");
    let found = found_after_restart(room.path());
    assert_eq!(found.attribute("ns", "key").as_deref(), Some(b"after".as_slice()));
}

#[test]
fn a_forgotten_vm_leaves_no_file_though_a_slot_still_writes() {
    let room = tempfile::tempdir().expect("a directory");
    let (mailboxes, mut saves) = open(room.path());
    let mailbox = mailboxes.get(&uuid());
    fill(&mailbox);
    mailboxes.save_all();
    mailboxes.forget(&uuid()).expect("removed");
    mailbox.set_attribute("ns", "late", b"v").expect("small");
    while let Ok(kept) = saves.queue.try_recv() {
        kept.save().expect("nothing to do");
    }
    assert_eq!(fs::read_dir(room.path()).expect("listed").count(), 0);
    assert_empty(&mailboxes.get(&uuid()));
}

#[test]
fn files_of_vms_that_went_away_are_swept_and_no_others() {
    let room = tempfile::tempdir().expect("a directory");
    let name = |n: u32, end: &str| format!("7c0f1a52-3b5e-4d1a-9d2c-{n:012x}{end}");
    for file in [&name(1, ".json"), &name(2, ".json"), &name(3, ".json.bad"), &name(4, ".txt"), "notes.json"]
    {
        fs::write(room.path().join(file), "{}").expect("written");
    }
    let (mailboxes, _saves) = open(room.path());
    assert_eq!(mailboxes.sweep(|vm| vm == name(1, "")).expect("swept"), 2);
    let mut left: Vec<_> = fs::read_dir(room.path())
        .expect("listed")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("text"))
        .collect();
    left.sort();
    assert_eq!(left, [name(1, ".json"), name(4, ".txt"), "notes.json".to_owned()]);
}

#[test]
fn a_file_that_cannot_be_read_is_put_aside_and_the_vm_begins_anew() {
    for (case, text) in [
        ("no JSON", "posted".to_owned()),
        ("another version", r#"{"version":2}"#.to_owned()),
        ("too large", " ".repeat((4 << 20) + 1)),
    ] {
        let room = tempfile::tempdir().expect("a directory");
        let file = room.path().join(format!("{UUID}.json"));
        fs::write(&file, &text).expect("written");
        let (mailboxes, _saves) = open(room.path());
        let mailbox = mailboxes.get(&uuid());
        assert_empty(&mailbox);
        assert_eq!(mailboxes.counts().loads_failed, 1, "{case}");
        let aside = fs::read_to_string(file.with_extension("json.bad")).expect("put aside");
        assert_eq!(aside, text, "{case}");
        fill(&mailbox);
        mailboxes.save_all();
        assert_filled(&found_after_restart(room.path()));
    }
}

#[test]
fn a_full_mailbox_fits_the_file_that_is_read() {
    let room = tempfile::tempdir().expect("a directory");
    let (mailboxes, _saves) = open(room.path());
    let mailbox = mailboxes.get(&uuid());
    let longest = |n: usize| format!("{n:0>ATTRIBUTE_NAME_CHARS$}");
    for n in 0..ATTRIBUTES_PER_VM {
        let value = [255; ATTRIBUTES_OCTETS_PER_VM / ATTRIBUTES_PER_VM - 2 * ATTRIBUTE_NAME_CHARS];
        let set = mailbox.set_attribute(&longest(n), &longest(n), &value);
        set.expect("within the bounds");
    }
    for document in [Document::Kubeconfig, Document::AppCustomStatus] {
        mailbox.store_document(document, &[255; DOCUMENT_OCTETS]).expect("within the bounds");
    }
    mailbox.post_password(&[255; PASSWORD_OCTETS]).expect("within the bounds");
    mailboxes.save_all();
    let found = found_after_restart(room.path());
    assert_eq!(found.attributes(), mailbox.attributes());
}

#[test]
fn a_disk_that_refuses_is_counted_and_the_guest_keeps_its_answer() {
    let room = tempfile::tempdir().expect("a directory");
    let directory = room.path().join("mailboxes");
    let (mailboxes, _saves) = open(&directory);
    let mailbox = mailboxes.get(&uuid());
    fill(&mailbox);
    fs::remove_dir(&directory).expect("removed");
    mailboxes.save_all();
    assert_eq!(mailboxes.counts().saves_failed, 1);
    assert_filled(&mailbox);
    fs::create_dir(&directory).expect("made again");
    mailboxes.save_all();
    assert_filled(&found_after_restart(&directory));
}

#[test]
fn a_state_directory_that_is_none_is_refused() {
    let room = tempfile::tempdir().expect("a directory");
    let file = room.path().join("file");
    fs::write(&file, "").expect("written");
    let error = Mailboxes::open(&file, Outbox::detached()).expect_err("a file is no directory");
    assert!(error.to_string().contains("check the state directory"), "{error}");
}

#[test]
fn nothing_a_guest_wrote_is_shown() {
    let mailbox = mailbox();
    fill(&mailbox);
    let shown = format!("{mailbox:?}");
    assert!(shown.contains(UUID) && !shown.contains("posted") && !shown.contains("secret"), "{shown}");
}
