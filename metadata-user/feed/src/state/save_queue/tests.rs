use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{NAMED_MOST, RETRY_FIRST, RETRY_MOST, SAVE_PAUSE, SaveQueue, StateFile};

/// A disk that is full or not, and what was written to it.
#[derive(Clone, Default)]
struct Disk {
    is_full: Arc<AtomicBool>,
    attempts: Arc<AtomicUsize>,
    contents: Arc<Mutex<Vec<&'static str>>>,
}

impl Disk {
    fn full() -> Self {
        let disk = Self::default();
        disk.is_full.store(true, Ordering::Relaxed);
        disk
    }

    fn write(&self, text: &'static str) -> impl FnMut() -> io::Result<()> + Send + 'static {
        let disk = self.clone();
        move || {
            disk.attempts.fetch_add(1, Ordering::Relaxed);
            if disk.is_full.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            disk.contents.lock().expect("contents").push(text);
            Ok(())
        }
    }

    fn contents(&self) -> Vec<&'static str> {
        self.contents.lock().expect("contents").clone()
    }
}

fn mailbox(n: usize) -> StateFile {
    StateFile::Mailbox(format!("vm-{n}").into())
}

#[tokio::test(start_paused = true)]
async fn a_write_that_failed_is_repeated_with_growing_pauses_until_it_succeeds() {
    let (queue, disk) = (SaveQueue::default(), Disk::full());
    let running = tokio::spawn(queue.clone().run());
    queue.submit(mailbox(0), disk.write("first"));
    tokio::time::sleep(Duration::from_secs(3_600)).await;
    let attempts = disk.attempts.load(Ordering::Relaxed);
    let fewest = (3_600 / (RETRY_MOST + SAVE_PAUSE).as_secs().max(1)) as usize - 60;
    assert!((fewest..3_600).contains(&attempts), "{attempts} attempts in an hour");
    let unsaved = queue.unsaved(|_| true).expect("it is reported");
    assert_eq!((unsaved.count, unsaved.named), (1, vec![mailbox(0)]));
    assert!(unsaved.since > Duration::from_secs(3_500), "{:?}", unsaved.since);
    assert_eq!((queue.failed(), queue.unsaved_count()), (attempts as u64, 1));
    disk.is_full.store(false, Ordering::Relaxed);
    tokio::time::sleep(RETRY_MOST + 2 * SAVE_PAUSE).await;
    assert_eq!(disk.contents(), ["first"]);
    assert_eq!((queue.unsaved(|_| true), queue.unsaved_count()), (None, 0));
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn a_file_that_cannot_be_written_delays_no_other_one() {
    let (queue, full, disk) = (SaveQueue::default(), Disk::full(), Disk::default());
    let running = tokio::spawn(queue.clone().run());
    queue.submit(mailbox(0), full.write("never"));
    tokio::time::sleep(RETRY_MOST).await;
    queue.submit(mailbox(1), disk.write("at once"));
    tokio::time::sleep(2 * SAVE_PAUSE).await;
    assert_eq!(disk.contents(), ["at once"]);
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn a_later_write_replaces_the_failed_one_and_waits_for_its_pause() {
    let (queue, disk) = (SaveQueue::default(), Disk::full());
    queue.submit(StateFile::Dialects, disk.write("former"));
    queue.flush();
    assert_eq!(disk.attempts.load(Ordering::Relaxed), 1);
    queue.submit(StateFile::Dialects, disk.write("later"));
    disk.is_full.store(false, Ordering::Relaxed);
    let running = tokio::spawn(queue.clone().run());
    tokio::time::sleep(RETRY_FIRST / 2).await;
    assert_eq!(disk.contents(), Vec::<&str>::new());
    tokio::time::sleep(RETRY_FIRST + SAVE_PAUSE).await;
    assert_eq!(disk.contents(), ["later"]);
    running.abort();
}

#[test]
fn a_flush_writes_everything_and_names_what_is_lost() {
    let (queue, full, disk) = (SaveQueue::default(), Disk::full(), Disk::default());
    for n in 0..NAMED_MOST + 3 {
        queue.submit(mailbox(n), full.write("lost"));
    }
    queue.submit(StateFile::Snapshot, full.write("lost"));
    queue.submit(StateFile::Dialects, disk.write("kept"));
    queue.flush();
    assert_eq!(disk.contents(), ["kept"]);
    let unsaved = queue.unsaved(StateFile::is_of_guest).expect("it is reported");
    assert_eq!((unsaved.count, unsaved.named.len()), (NAMED_MOST + 3, NAMED_MOST));
    let text = unsaved.to_string();
    for part in ["data that VM vm-0 wrote, ", " and 3 more: ", "make room in the state directory"] {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
    full.is_full.store(false, Ordering::Relaxed);
    queue.flush();
    assert_eq!(queue.unsaved(|_| true), None);
    assert_eq!(full.contents().len(), NAMED_MOST + 4, "each was written once");
}

#[test]
fn a_write_submitted_while_the_former_one_fails_is_the_one_that_is_repeated() {
    let (queue, disk) = (SaveQueue::default(), Disk::default());
    let (again, later) = (queue.clone(), disk.write("later"));
    let mut later = Some(later);
    queue.submit(mailbox(0), move || {
        if let Some(later) = later.take() {
            again.submit(mailbox(0), later);
        }
        Err(io::ErrorKind::StorageFull.into())
    });
    queue.flush();
    assert_eq!(queue.unsaved_count(), 1);
    queue.flush();
    assert_eq!((disk.contents(), queue.unsaved_count()), (vec!["later"], 0));
}
