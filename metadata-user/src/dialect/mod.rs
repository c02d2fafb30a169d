//! One file per dialect: a record in, paths and responses out.
