// Package bucket has the files of a prefix of a bucket, by the cache and the S3 client of rclone.
package bucket

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/aws/smithy-go"
	_ "github.com/rclone/rclone/backend/local" // keeps the cache
	_ "github.com/rclone/rclone/backend/s3"
	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/fs/config/configmap"

	"github.com/barchan-dev/barchan/runtimes/volumefs/backend"
)

const (
	// idleTimeout bounds a connection on which nothing arrives.
	idleTimeout = 10 * time.Second
	attempts    = 2
)

// Open returns the files of a bucket, or why it cannot be reached.
func Open(ctx context.Context, cfg backend.Config) (backend.Backend, backend.Answer) {
	b, err := openBucket(ctx, cfg)
	if err != nil {
		return nil, backend.Answer{Reason: backend.ReasonInvalid, Message: err.Error()}
	}
	if a := b.check(ctx); a.Reason != "" {
		return nil, a
	}
	t, err := newTree(ctx, b, cfg)
	if err != nil {
		return nil, backend.Answer{Reason: backend.ReasonBackend, Message: backend.Shorten(err)}
	}
	return t, backend.Answer{}
}

// bucket is a prefix of a bucket, or the whole of one.
type bucket struct {
	fs.Fs
	readOnly, whole bool
}

// openBucket asks the endpoint nothing.
func openBucket(ctx context.Context, cfg backend.Config) (*bucket, error) {
	endpoint, err := url.Parse(cfg.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("endpoint: %w", err)
	}
	proxy, err := guard(endpoint, cfg.Denied)
	if err != nil {
		return nil, err
	}
	ci := fs.GetConfig(ctx) // the process has one backend
	ci.HTTPProxy = proxy
	ci.ConnectTimeout, ci.Timeout = fs.Duration(backend.ConnectTimeout), fs.Duration(idleTimeout)
	ci.LowLevelRetries, ci.Transfers, ci.BufferSize = attempts, 4, 1<<20
	ci.UserAgent = "barchan"
	ci.LogLevel = fs.LogLevelError
	if cfg.CA != "" {
		file := filepath.Join(cfg.Cache, "ca.crt")
		if err := os.WriteFile(file, []byte(cfg.CA), 0o600); err != nil {
			return nil, err
		}
		ci.CaCert = []string{file}
	}
	provider := "Other"
	if strings.HasSuffix(endpoint.Hostname(), ".amazonaws.com") {
		provider = "AWS"
	}
	info, err := fs.Find("s3")
	if err != nil {
		return nil, err
	}
	options := fs.ConfigMap(info.Prefix, info.Options, "volume", configmap.Simple{
		"provider": provider, "endpoint": cfg.Endpoint, "region": cfg.Region, "force_path_style": "true",
		"access_key_id": cfg.AccessKeyID, "secret_access_key": cfg.SecretAccessKey, "session_token": cfg.SessionToken,
		"env_auth": "false", "no_check_bucket": "true", "directory_markers": "true", "upload_concurrency": "2",
	})
	root := cfg.Bucket + "/" // the slash says that it is no object, so the endpoint is not asked
	if prefix := strings.Trim(cfg.Prefix, "/"); prefix != "" {
		root += prefix + "/"
	}
	f, err := info.NewFs(ctx, "volume", root, options)
	if err != nil {
		return nil, err
	}
	return &bucket{Fs: f, readOnly: cfg.ReadOnly, whole: strings.Trim(cfg.Prefix, "/") == ""}, nil
}

// errEnough ends a list.
var errEnough = errors.New("enough")

// check asks for the first page of a list. A prefix without objects is made.
func (b *bucket) check(ctx context.Context) backend.Answer {
	ctx, cancel := context.WithTimeout(ctx, backend.CheckTimeout)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		err := b.Features().ListP(ctx, "", func(fs.DirEntries) error { return errEnough })
		if errors.Is(err, fs.ErrorDirNotFound) && !b.readOnly && !b.whole {
			err = b.Mkdir(ctx, "")
		}
		done <- err
	}()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err == nil || errors.Is(err, errEnough) {
		return backend.Answer{}
	}
	a := backend.Answer{Reason: reasonOf(err), Message: backend.Shorten(err)}
	var api smithy.APIError
	switch {
	case a.Reason == backend.ReasonBucket:
		a.Message = "the bucket does not exist, or has no such prefix"
	case a.Reason == backend.ReasonDenied && errors.As(err, &api):
		a.Message = "the endpoint refuses the credentials: " + api.ErrorCode()
	case a.Reason == backend.ReasonRefused:
		a.Message = backend.ErrRefused.Error()
	case a.Reason == backend.ReasonUnreachable && errors.Is(err, context.DeadlineExceeded):
		a.Message = fmt.Sprintf("the endpoint does not answer within %v", backend.CheckTimeout)
	case a.Reason == backend.ReasonUnreachable:
		a.Message = "no connection to the endpoint"
	}
	return a
}

// reasonOf classifies an error of the backend.
func reasonOf(err error) string {
	var api smithy.APIError
	var network net.Error
	switch {
	case strings.Contains(err.Error(), backend.ErrRefused.Error()) || strings.Contains(err.Error(), socksRefused):
		return backend.ReasonRefused
	case errors.Is(err, fs.ErrorDirNotFound):
		return backend.ReasonBucket
	case errors.As(err, &api):
		switch api.ErrorCode() {
		case "NoSuchBucket":
			return backend.ReasonBucket
		case "AccessDenied", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "XAdminUserNotFound", "AllAccessDisabled", "ExpiredToken", "InvalidToken":
			return backend.ReasonDenied
		}
		return backend.ReasonBackend
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &network):
		return backend.ReasonUnreachable
	}
	return backend.ReasonBackend
}
