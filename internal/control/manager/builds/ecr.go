package builds

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

const (
	ecrTimeout = 10 * time.Second
	maxECR     = 64 << 10 // bytes of an answer
	ecrTarget  = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken"
	ecrType    = "application/x-amz-json-1.1"
)

// awsRegion has no dot and no slash: a region is a part of the host that the key is used with.
var awsRegion = regexp.MustCompile(`^[a-z]{2,4}(-[a-z]+)+-[0-9]{1,2}$`)

// ecrHost returns the host of Amazon's registry API in a region.
func ecrHost(region string) string {
	host := "api.ecr." + region + ".amazonaws.com"
	if strings.HasPrefix(region, "cn-") {
		host += ".cn"
	}
	return host
}

// ECR gets passwords of Amazon's registries.
type ECR struct {
	// Client sends the requests. Nil: one that follows no redirect and uses the machine's proxy settings.
	Client *http.Client
}

// exchange replaces the keys of Amazon among the credentials of a build by the registry's password, which is good for twelve hours. The server keeps
// that in place of the keys.
func (e *ECR) exchange(ctx context.Context, what *Instructions) error {
	ctx, cancel := context.WithTimeout(ctx, ecrTimeout)
	defer cancel()
	seen := map[Registry]string{}
	replace := func(at string, r *Registry) (*Registry, error) {
		if r == nil || r.Type != registryAmazon {
			return r, nil
		}
		field := at + "fromImageRegistry."
		if err := r.checkAmazon(field); err != nil {
			return nil, err
		}
		password, has := seen[*r]
		if !has {
			var err error
			if password, err = e.password(ctx, r); err != nil {
				return nil, errs.Public(err, field+"awsAccessKeyId: "+errs.Text(err))
			}
			seen[*r] = password
		}
		return &Registry{Type: registryGeneral, Username: "AWS", Password: password}, nil
	}
	var err error
	if what.Registry, err = replace("", what.Registry); err != nil {
		return err
	}
	for i := range what.Stages {
		if what.Stages[i].Registry, err = replace(fmt.Sprintf("stages[%d].", i), what.Stages[i].Registry); err != nil {
			return err
		}
	}
	return nil
}

func (r *Registry) checkAmazon(field string) error {
	for name, value := range map[string]string{"awsAccessKeyId": r.AccessKeyID, "awsSecretAccessKey": r.SecretAccessKey} {
		if value == "" || len(value) > maxCredential {
			return apistatus.Refuse(errs.ErrInvalid, "%s%s: must have from 1 to %d bytes", field, name, maxCredential)
		}
	}
	if !awsRegion.MatchString(r.Region) {
		return apistatus.Refuse(errs.ErrInvalid, "%sawsRegion: %.80q is no region, such as eu-central-1", field, r.Region)
	}
	return nil
}

// password asks for the registry's password. An error has neither key nor password.
func (e *ECR) password(ctx context.Context, r *Registry) (string, error) {
	body := []byte("{}")
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+ecrHost(r.Region)+"/", bytes.NewReader(body))
	if err != nil {
		return "", fmt.Errorf("ask ECR: %w", err)
	}
	req.Header.Set("Content-Type", ecrType)
	req.Header.Set("X-Amz-Target", ecrTarget)
	sum := sha256.Sum256(body)
	key := aws.Credentials{AccessKeyID: r.AccessKeyID, SecretAccessKey: r.SecretAccessKey}
	if err := v4.NewSigner().SignHTTP(ctx, key, req, hex.EncodeToString(sum[:]), "ecr", r.Region, time.Now()); err != nil {
		return "", fmt.Errorf("sign request to ECR: %w", err)
	}
	client := e.Client
	if client == nil {
		client = &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	res, err := client.Do(req)
	if err != nil {
		return "", errs.Public(errors.Join(errs.ErrUnavailable, err), "the server cannot reach "+ecrHost(r.Region)+"; give type registry the user AWS and what `aws ecr get-login-password` prints")
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(res.Body, maxECR))
	if err != nil {
		return "", errs.Public(errors.Join(errs.ErrUnavailable, err), ecrHost(r.Region)+" ended its answer early")
	}
	return readPassword(res.StatusCode, text, ecrHost(r.Region))
}

// readPassword reads an answer of ECR, whose token is the user AWS and the password.
func readPassword(status int, text []byte, host string) (string, error) {
	var answer struct {
		Type              string `json:"__type"`
		AuthorizationData []struct {
			AuthorizationToken string `json:"authorizationToken"`
		} `json:"authorizationData"`
	}
	err := json.Unmarshal(text, &answer)
	switch {
	case status >= http.StatusInternalServerError:
		return "", apistatus.Refuse(errs.ErrUnavailable, "%s answers %d; try again", host, status)
	case status != http.StatusOK:
		return "", apistatus.Refuse(errs.ErrInvalid, "%s refuses the key: %d %.100q", host, status, answer.Type)
	case err != nil || len(answer.AuthorizationData) == 0:
		return "", apistatus.Refuse(errs.ErrUnavailable, "%s answers without a token", host)
	}
	token, err := base64.StdEncoding.DecodeString(answer.AuthorizationData[0].AuthorizationToken)
	if user, password, ok := strings.Cut(string(token), ":"); err == nil && ok && user == "AWS" && password != "" {
		return password, nil
	}
	return "", apistatus.Refuse(errs.ErrUnavailable, "%s answers with a token of another kind", host)
}
