//! The part of a VM's mailbox that outlives the agent, and whether it is on disk.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::locked;
use super::state::State;

/// Schedules a changed mailbox to be saved. The packet path calls it, so it must not wait.
pub type Saver = Box<dyn Fn(Arc<Kept>) + Send + Sync>;

/// The stored state of one VM, and its file.
pub struct Kept {
    vm: Box<str>,
    changing: Mutex<Changing>,
    /// True from a change until its save begins. So a mailbox is in the queue at most once, and the queue has at most
    /// one entry per VM.
    queued: AtomicBool,
    /// Path of the file, locked while it is written; `None` without a file or after [`detach`](Self::detach).
    file: Mutex<Option<PathBuf>>,
    saver: Option<Saver>,
}

#[derive(Default)]
struct Changing {
    state: State,
    /// Grows with each change.
    revision: u64,
    /// The revision on disk.
    saved: u64,
}

impl Kept {
    /// Creates an empty state without a file for the VM of this owner.
    #[must_use]
    pub fn in_memory(vm: &str) -> Self {
        Self::new(vm, State::default(), None, None)
    }

    /// Creates the state of the VM of this owner, with its file and the scheduler of saves.
    #[must_use]
    pub fn new(vm: &str, mut state: State, file: Option<PathBuf>, saver: Option<Saver>) -> Self {
        state.set_owner(vm);
        let changing = Mutex::new(Changing { state, ..Changing::default() });
        Self { vm: vm.into(), changing, queued: AtomicBool::new(false), file: Mutex::new(file), saver }
    }

    /// Returns the owner of the VM's state.
    #[must_use]
    pub fn vm(&self) -> &str {
        &self.vm
    }

    pub(super) fn read<T>(&self, get: impl FnOnce(&State) -> T) -> T {
        get(&locked(&self.changing).state)
    }

    pub(super) fn change(self: &Arc<Self>, change: impl FnOnce(&mut State)) {
        self.change_if(|state| {
            change(state);
            true
        });
    }

    /// `change` returns whether the state has to be saved.
    pub(super) fn change_if(self: &Arc<Self>, change: impl FnOnce(&mut State) -> bool) {
        let changed: Result<(), std::convert::Infallible> = self.try_change(|state| Ok(change(state)));
        match changed {
            Ok(()) => {}
        }
    }

    /// `change` returns whether the state has to be saved.
    pub(super) fn try_change<E>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut State) -> Result<bool, E>,
    ) -> Result<(), E> {
        let mut changing = locked(&self.changing);
        if !change(&mut changing.state)? {
            return Ok(());
        }
        changing.revision += 1;
        drop(changing);
        if let Some(saver) = self.saver.as_ref().filter(|_| !self.queued.swap(true, Ordering::AcqRel)) {
            saver(Arc::clone(self));
        }
        Ok(())
    }

    /// Replaces the state by the content that another agent wrote to the file.
    pub(super) fn replace(&self, mut state: State) {
        state.set_owner(&self.vm);
        let mut changing = locked(&self.changing);
        changing.state = state;
        changing.saved = changing.revision;
    }

    /// Calls `write` with path and new content if there is a file and it is out of date.
    ///
    /// # Errors
    /// The error of `write`; the file then still counts as out of date.
    pub fn save(&self, write: impl FnOnce(&Path, &[u8]) -> io::Result<()>) -> io::Result<()> {
        self.queued.store(false, Ordering::Release);
        let file = locked(&self.file);
        let Some(path) = file.as_deref() else { return Ok(()) };
        // The copy shares the octets, so a guest that writes meanwhile does not wait for the serialization.
        let (state, revision) = {
            let changing = locked(&self.changing);
            if changing.revision == changing.saved {
                return Ok(());
            }
            (changing.state.clone(), changing.revision)
        };
        let text = serde_json::to_vec(&state)?;
        write(path, &text)?;
        locked(&self.changing).saved = revision;
        Ok(())
    }

    /// Waits for a save in progress and prevents later ones.
    pub fn detach(&self) {
        *locked(&self.file) = None;
    }
}
